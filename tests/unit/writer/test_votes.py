"""The coordinator counts whole parts of its own attempt, reads each once, and gives up in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import samples
from tests.faults import FaultyStore
from torch_ckpt.errors import FormatError, SaveFailed
from torch_ckpt.manifest.commit import publish_part
from torch_ckpt.manifest.layout import part_name, shard_name
from torch_ckpt.manifest.schema import Part, StoredFile
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.leftovers import refuse, sweep_lost, withdraw_all
from torch_ckpt.writer.shard import Written
from torch_ckpt.writer.votes import Outside, Votes, await_votes

ATTEMPT = "0123a005"
OWN = StoredFile(name=part_name(0, ATTEMPT), bytes=10, sha256="a" * 64)
SHARD = StoredFile(name=shard_name(0, ATTEMPT), bytes=7)


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    store = FaultyStore(LocalStore(str(tmp_path)))
    store.make_folder("g")
    return store


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def part(rank: int) -> Part:
    return samples.image(samples.arrays(), attempt=ATTEMPT, rank=rank, world_size=4).part


def wait(
    store: FaultyStore,
    pool: ThreadPoolExecutor,
    timeout_s: float = 30.0,
    *,
    ranks: int = 4,
    abandoned: Callable[[], str | None] = lambda: None,
    alone: bool = False,
    own_s: float = 0.0,
) -> Votes:
    job = Job(
        root=store.url,
        folder="g",
        step=1,
        attempt=ATTEMPT,
        run="run-a",
        rank=0,
        world_size=ranks,
        created="",
        pieces=[],
        raw_bytes=0,
        commit_timeout_s=timeout_s,
    )
    outside = Outside(abandoned=abandoned, alone=lambda: alone, own_s=own_s)
    return await_votes(store, job, (OWN, Written(files=(SHARD,))), pool, outside)


def test_a_rank_alone_needs_no_storage(store: FaultyStore, pool: ThreadPoolExecutor) -> None:
    assert wait(store, pool, ranks=1) == Votes(parts=(OWN,), shard_bytes=7)
    assert [call for call, _ in store.calls] == ["make_folder", "entries"]


def test_votes_cost_one_listing_a_poll_and_one_read_a_part(
    store: FaultyStore, pool: ThreadPoolExecutor
) -> None:
    publish_part(store, "g", part(2))
    store.calls.clear()
    late = threading.Timer(0.5, lambda: [publish_part(store, "g", part(r)) for r in (3, 1)])
    late.start()
    votes = wait(store, pool)
    late.join()
    assert [stored.name for stored in votes.parts] == [part_name(r, ATTEMPT) for r in range(4)]
    size = part(1).files[0].bytes
    assert votes.shard_bytes == 7 + 3 * size
    reads = [name for call, name in store.calls if call == "get"]
    assert sorted(reads) == [f"g/{part_name(rank, ATTEMPT)}" for rank in (1, 2, 3)]
    assert sum(call == "entries" for call, _ in store.calls) < 15, "the polls back off"


def test_a_part_whose_end_is_missing_counts_once_it_is_there(
    store: FaultyStore, pool: ThreadPoolExecutor
) -> None:
    for rank in (1, 2, 3):
        publish_part(store, "g", part(rank))
    path = Path(store.url, "g", part_name(2, ATTEMPT))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SaveFailed, match="rank 2 did not finish its part within"):
        wait(store, pool, 0.2)
    late = threading.Timer(0.3, path.write_bytes, [whole])
    late.start()
    assert wait(store, pool).parts[2].bytes == len(whole)
    late.join()


@pytest.mark.parametrize(
    "fields",
    [
        {"step": 9},
        {"run": "another"},
        {"world_size": 5},
        {"rank": 3},
        {"files": (StoredFile(name=shard_name(3, ATTEMPT), bytes=10**6),)},
        {"files": (StoredFile(name=shard_name(1, "00000000"), bytes=10**6),)},
    ],
)
def test_a_part_of_another_save_or_with_anothers_shard_is_refused(
    store: FaultyStore, pool: ThreadPoolExecutor, fields: dict[str, Any]
) -> None:
    store.put(f"g/{part_name(1, ATTEMPT)}", replace(part(1), **fields).dump())
    with pytest.raises(SaveFailed, match="rank-00001"):
        wait(store, pool)


def test_a_part_of_an_unknown_format_is_refused(
    store: FaultyStore, pool: ThreadPoolExecutor
) -> None:
    data = part(1).dump().replace(b"torch-ckpt/1", b"torch-ckpt/9", 1)
    store.put(f"g/{part_name(1, ATTEMPT)}", data)
    with pytest.raises(FormatError, match="torch-ckpt/9"):
        wait(store, pool)


def test_a_refusal_ends_the_wait_with_its_reason(
    store: FaultyStore, pool: ThreadPoolExecutor
) -> None:
    refuse(store, "g", 3, "00000000", "of another attempt")
    refuse(store, "g", 2, ATTEMPT, "no space\nleft\0 on the disk")
    with pytest.raises(SaveFailed, match=r"rank 2 gave up: no space left\? on the disk"):
        wait(store, pool)


def test_a_rank_whose_vote_is_there_cannot_refuse(
    store: FaultyStore, pool: ThreadPoolExecutor
) -> None:
    for rank in (1, 2, 3):
        publish_part(store, "g", part(rank))
    refuse(store, "g", 2, ATTEMPT, "its writer ended")
    assert len(wait(store, pool).parts) == 4
    assert not [entry for entry in store.entries("g") if entry.name.endswith(".failed")]


def test_a_word_of_the_trainer_ends_the_wait(store: FaultyStore, pool: ThreadPoolExecutor) -> None:
    with pytest.raises(SaveFailed, match="failed on another rank"):
        wait(store, pool, abandoned=lambda: "its share failed on another rank")


def test_without_a_trainer_only_news_keep_the_coordinator_waiting(
    store: FaultyStore, pool: ThreadPoolExecutor
) -> None:
    """A thirtieth of the time-out is the patience: half a second here."""
    began = time.monotonic()
    with pytest.raises(SaveFailed, match="rank 1, 2, 3 did not finish its part, and wrote nothing"):
        wait(store, pool, 15.0, alone=True)
    assert time.monotonic() - began < 10
    stop = threading.Event()

    def write_on() -> None:
        for size in range(1000):
            if stop.wait(0.1):
                return
            Path(store.url, "g", shard_name(1, ATTEMPT)).write_bytes(bytes(size))

    writing = threading.Thread(target=write_on)
    writing.start()
    late = threading.Timer(2.0, lambda: [publish_part(store, "g", part(r)) for r in (1, 2, 3)])
    late.start()
    assert len(wait(store, pool, 15.0, alone=True).parts) == 4
    stop.set()
    writing.join()
    late.join()


def test_shares_take_about_as_long_as_ones_own(
    store: FaultyStore, pool: ThreadPoolExecutor
) -> None:
    late = threading.Timer(1.5, lambda: [publish_part(store, "g", part(r)) for r in (1, 2, 3)])
    late.start()
    assert len(wait(store, pool, 15.0, alone=True, own_s=2.0).parts) == 4
    late.join()


def test_giving_up_removes_the_attempt_of_all_ranks_and_nothing_else(store: FaultyStore) -> None:
    for rank in (1, 2):
        publish_part(store, "g", part(rank))
        store.put(f"g/{shard_name(rank, ATTEMPT)}", b"shard")
    refuse(store, "g", 3, ATTEMPT, "no space")
    store.put(f"g/{part_name(1, '0123a006')}", b"a later try")
    store.put("g/notes.txt", b"somebody's")
    withdraw_all(store, "g", ATTEMPT)
    assert [entry.name for entry in store.entries("g")] == ["notes.txt", part_name(1, "0123a006")]


def test_a_commit_clears_up_earlier_tries_of_its_session_alone(store: FaultyStore) -> None:
    kept = [part_name(1, "0123a007"), part_name(1, "fffff001"), "notes.txt"]
    gone = [part_name(1, "0123a003"), shard_name(2, "0123a004"), "rank-00003.0123a004.failed"]
    for name in (*kept, *gone):
        store.put(f"g/{name}", b"x")
    sweep_lost(store, ["g", "not-there"], ATTEMPT)
    assert sorted(entry.name for entry in store.entries("g")) == sorted(kept)
