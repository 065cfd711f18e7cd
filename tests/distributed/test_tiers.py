"""Ranks on several nodes promote their own shares, and come back from one tier together."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import sharded_job
from tests.distributed.ranks import run_ranks
from torch_ckpt import Checkpointer, KeepLast
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.local import LocalStore

RANKS = 4


def node_of(rank: int) -> str:
    """Two ranks a node, each node with a disk of its own."""
    return f"node-{rank // 2}"


def open_tiers(folder: str, rank: int, **changed: Any) -> Checkpointer:
    place = Path(folder)
    return Checkpointer(
        place / "root",
        archive=place / "archive",
        cache=place / node_of(rank),
        **{"keep": KeepLast(1), **changed},
    )


def save(rank: int, folder: str, steps: int, options: dict[str, Any] | None = None) -> list[str]:
    model, optimizer = sharded_job.build("fsdp")
    states = []
    with open_tiers(folder, rank, **options or {}) as checkpointer:
        for step in range(1, steps + 1):
            sharded_job.train(model, optimizer, step)
            state = {"model": model, "optimizer": optimizer, "step": step}
            pending = checkpointer.save(state, step)
            pending.wait("archived", 60)
            states.append(pending.state)
    truth = sharded_job.whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    if rank == 0:
        torch.save(truth, Path(folder) / "truth.pt")
    return states


def resume(rank: int, folder: str, how: str = "fsdp") -> tuple[int | None, str, list[str]]:
    """The step, the tier that gave it, and what differs from the truth."""
    model, optimizer = sharded_job.build(how)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with open_tiers(folder, rank) as checkpointer:
        generation = checkpointer.resume(state)
    found = sharded_job.whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    truth = torch.load(Path(folder) / "truth.pt")
    tier = Path(generation.url).parent.name if generation else ""
    return generation and generation.step, tier, sharded_job.equal(truth, found)


def stage_and_die(rank: int, folder: str) -> None:
    """Every trainer is killed as soon as its snapshot is in its writer's hands."""
    model, optimizer = sharded_job.build("fsdp")
    sharded_job.train(model, optimizer, 1)
    truth = sharded_job.whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    if rank == 0:
        torch.save(truth, Path(folder) / "truth.pt")
    checkpointer = open_tiers(folder, rank)
    checkpointer.save({"model": model, "optimizer": optimizer, "step": 1}, 1, block="staged")
    os.kill(os.getpid(), signal.SIGKILL)


def committed_in(root: Path) -> list[int]:
    return sorted(one.step for one in Catalog(LocalStore(str(root))).committed())


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiers")
    (folder / "run").mkdir()
    results = run_ranks(folder / "save", save, RANKS, str(folder / "run"), 2)
    assert results == [["committed"] * 2] * RANKS, results
    return folder / "run"


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "run")


def test_each_rank_sends_its_own_share_and_each_node_keeps_its_own(saved: Path) -> None:
    assert committed_in(saved / "archive") == [1, 2]
    assert committed_in(saved / "root") == [2]
    for node, ranks in (("node-0", "01"), ("node-1", "23")):
        shards = sorted(path.name[9:10] for path in saved.glob(f"{node}/*/*.safetensors"))
        assert shards == list(ranks)
        assert len(list(saved.glob(f"{node}/*/rank-*.json"))) == RANKS
    for step in (1, 2):
        store = LocalStore(str(saved / "archive"))
        report = verify(store, Catalog(store).find(step=step))
        assert report.ok, report


def test_ranks_read_from_their_caches_or_all_of_them_from_farther_away(
    saved: Path, tmp_path: Path
) -> None:
    found = run_ranks(tmp_path / "cached", resume, RANKS, str(saved))
    assert found == [(2, node_of(rank), []) for rank in range(RANKS)], found
    shutil.rmtree(saved / "node-1")
    assert run_ranks(tmp_path / "one", resume, RANKS, str(saved)) == [(2, "root", [])] * RANKS
    shutil.rmtree(saved / "node-0")
    shutil.rmtree(saved / "root")
    found = run_ranks(tmp_path / "archive", resume, RANKS, str(saved))
    assert found == [(2, "archive", [])] * RANKS, found
    found = run_ranks(tmp_path / "again", resume, RANKS, str(saved))
    assert found == [(2, node_of(rank), []) for rank in range(RANKS)], found


def test_caches_of_an_encoded_line_hold_what_their_ranks_build_on(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    line = {"codec": "zstd", "incremental": True}
    run_ranks(tmp_path / "saved", save, RANKS, str(place), 3, line)
    for node, ranks in (("node-0", "01"), ("node-1", "23")):
        shards = {path.name[9:10] for path in place.glob(f"{node}/*/*.blocks")}
        assert shards == set(ranks)
    for path in (place / "root").glob("*/*.blocks"):
        path.unlink()
    found = run_ranks(tmp_path / "cached", resume, RANKS, str(place))
    assert found == [(3, node_of(rank), []) for rank in range(RANKS)], found


@pytest.mark.slow
def test_fewer_ranks_than_were_saved_come_back_from_the_archive(
    saved: Path, tmp_path: Path
) -> None:
    shutil.rmtree(saved / "root")
    found = run_ranks(tmp_path / "fewer", resume, 2, str(saved))
    assert found == [(2, "archive", [])] * 2, found


@pytest.mark.slow
def test_a_damaged_share_in_one_cache_sends_all_ranks_to_the_next_tier(
    saved: Path, tmp_path: Path
) -> None:
    shard = next(saved.glob("node-1/*/rank-00003.*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(4096 + 100)
        file.write(b"\xff" * 64)
    found = run_ranks(tmp_path / "damaged", resume, RANKS, str(saved))
    assert found == [(2, "root", [])] * RANKS, found


def test_writers_whose_trainers_were_all_killed_still_archive_what_was_staged(
    tmp_path: Path,
) -> None:
    place = tmp_path / "run"
    place.mkdir()
    run_ranks(tmp_path / "die", stage_and_die, RANKS, str(place))
    deadline = time.monotonic() + 60
    while committed_in(place / "archive") != [1] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert committed_in(place / "archive") == [1]
    shutil.rmtree(place / "root")
    found = run_ranks(tmp_path / "after", resume, RANKS, str(place))
    assert [(step, differs) for step, _, differs in found] == [(1, [])] * RANKS, found
