"""Prune deletes what the rule drops, manifest first, and nothing that anything needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import samples
from tests.faults import FaultyStore
from torch_ckpt.errors import StorageError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.prune import prune
from torch_ckpt.generations.retention import KeepLast
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(str(tmp_path))


def left(store: Store) -> list[int]:
    return [one.step for one in Catalog(store).committed()]


def test_prune_deletes_what_is_dropped_and_says_why(store: Store) -> None:
    for step in (1, 2, 3, 4):
        samples.commit(store, step)
    verdicts = prune(Catalog(store), KeepLast(2), run="run-a")
    assert [(v.generation.step, v.kept) for v in verdicts] == [
        (4, True),
        (3, True),
        (2, False),
        (1, False),
    ]
    assert left(store) == [4, 3]
    assert store.folders() == ["step-0000000003", "step-0000000004"]


def test_dry_run_deletes_nothing(store: Store) -> None:
    for step in (1, 2):
        samples.commit(store, step)
    faulty = FaultyStore(store)
    verdicts = prune(Catalog(faulty), KeepLast(1), run=None, dry_run=True)
    assert [v.kept for v in verdicts] == [True, False]
    assert left(store) == [2, 1]
    assert not {"put", "delete", "delete_folder"} & {call for call, _ in faulty.calls}


def test_other_runs_neither_count_nor_go(store: Store) -> None:
    samples.commit(store, 1, run="mine")
    samples.commit(store, 2, run="mine")
    samples.commit(store, 3, run="other", folder="x")
    samples.commit(store, 4, run="other", folder="y")
    verdicts = prune(Catalog(store), KeepLast(1), run="mine")
    assert left(store) == [4, 3, 2]
    assert verdicts[0].reason == "belongs to run other"


def test_bases_of_kept_generations_stay_through_whole_chains(store: Store) -> None:
    samples.commit(store, 1)
    samples.commit(store, 2, bases=(1,))
    samples.commit(store, 3)
    samples.commit(store, 4, bases=(2,))
    verdicts = prune(Catalog(store), KeepLast(1), run="run-a")
    assert left(store) == [4, 2, 1]
    reasons = {v.generation.step: v.reason for v in verdicts}
    assert reasons[2] == "step 4 needs it as a base"
    assert reasons[1] == "step 2 needs it as a base"


def test_bases_of_other_runs_stay_too(store: Store) -> None:
    samples.commit(store, 1, run="mine")
    samples.commit(store, 2, run="mine")
    samples.commit(store, 3, run="fork", bases=(1,))
    prune(Catalog(store), KeepLast(1), run="mine")
    assert left(store) == [3, 2, 1]


def test_the_newest_usable_one_stays_beside_newer_ones_set_aside(store: Store) -> None:
    samples.commit(store, 1)
    samples.commit(store, 2)
    samples.commit(store, 9, tags={"aside": "went back to 2"})
    prune(Catalog(store), KeepLast(1), run="run-a")
    assert left(store) == [9, 2]


def test_prune_stopped_at_any_call_leaves_only_whole_generations(tmp_path: Path) -> None:
    for nth in range(1, 12):
        store = LocalStore(str(tmp_path / str(nth)))
        for step in (1, 2, 3, 4):
            samples.commit(store, step)
        faulty = FaultyStore(store)
        faulty.fail("delete", nth=nth)
        try:
            prune(Catalog(faulty), KeepLast(2), run="run-a")
        except StorageError:
            pass
        assert left(store)[:2] == [4, 3]
        assert all(verify(store, one).ok for one in Catalog(store).committed())


def test_storage_that_does_not_answer_deletes_nothing(store: Store) -> None:
    for step in (1, 2):
        samples.commit(store, step)
    faulty = FaultyStore(store)
    faulty.fail("get", nth=2)
    with pytest.raises(StorageError):
        prune(Catalog(faulty), KeepLast(1), run=None)
    assert left(store) == [2, 1]


def test_what_is_pinned_stays_with_its_reason_and_its_bases(store: Store) -> None:
    samples.commit(store, 1)
    samples.commit(store, 2, bases=(1,))
    samples.commit(store, 3)
    samples.commit(store, 4)
    asked: list[int] = []

    def pinned(one: Generation) -> str | None:
        asked.append(one.step)
        return "not archived yet" if one.step == 2 else None

    verdicts = prune(Catalog(store), KeepLast(1), run="run-a", pinned=pinned, dry_run=True)
    assert left(store) == [4, 3, 2, 1]
    assert asked == [3, 2, 1]  # only what the rule drops
    assert prune(Catalog(store), KeepLast(1), run="run-a", pinned=pinned) == verdicts
    assert left(store) == [4, 2, 1]
    reasons = {v.generation.step: v.reason for v in verdicts}
    assert reasons[2] == "not archived yet"
    assert reasons[1] == "step 2 needs it as a base"


def test_a_pin_that_cannot_be_told_deletes_nothing(store: Store) -> None:
    for step in (1, 2, 3):
        samples.commit(store, step)

    def pinned(_one: Generation) -> str | None:
        raise StorageError("503 slow down")

    with pytest.raises(StorageError):
        prune(Catalog(store), KeepLast(1), run="run-a", pinned=pinned)
    assert left(store) == [3, 2, 1]
