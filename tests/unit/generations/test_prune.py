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


def line(store: Store, *steps: int, ranks: int = 2) -> Generation:
    """Generations of which each is the parent of the next one; the last of them."""
    before = next(iter(Catalog(store).committed()), None)
    for step in steps:
        parent = None if before is None else {"step": before.step, "attempt": before.id[1]}
        before = samples.commit(store, step, ranks=ranks, parent=parent)
    assert before is not None
    return before


def kept_last(store: Store, *, over: bool = True) -> None:
    prune(Catalog(store), KeepLast(1), run="run-a", over=lambda key: over)


@pytest.mark.parametrize("operation", ["delete", "delete_folder"])
def test_what_a_prune_that_was_cut_left_goes_with_the_next_one(
    tmp_path: Path, operation: str
) -> None:
    cut = 0
    for nth in range(1, 12):
        store = LocalStore(str(tmp_path / str(nth)))
        line(store, 1, 2)
        faulty = FaultyStore(store)
        faulty.fail(operation, nth=nth)
        try:
            kept_last(faulty)
        except StorageError:
            cut += 1
        line(store, 3)
        kept_last(store)
        assert store.folders() == ["step-0000000003"]
        assert verify(store, Catalog(store).find(step=3)).ok
    assert cut >= (4 if operation == "delete" else 1)


def half_deleted(store: Store, one: Generation) -> list[str]:
    """Take the manifest away; the names that are left."""
    store.delete(f"{one.folder}/manifest.json")
    return [entry.name for entry in store.entries(one.folder)]


def test_only_what_was_committed_once_counts_as_half_deleted(store: Store) -> None:
    half_deleted(store, samples.commit(store, 1))
    uncommitted = store.entries("step-0000000001")
    line(store, 2, 3, 4)
    kept_last(store)
    assert store.entries("step-0000000001") == uncommitted


def test_what_is_still_on_its_way_is_not_half_deleted(store: Store) -> None:
    line(store, 1)
    names = half_deleted(store, line(store, 2))
    samples.commit(store, 3, parent={"step": 2, "attempt": names[0].split(".")[1]})
    kept_last(store, over=False)
    assert [entry.name for entry in store.entries("step-0000000002")] == names
    kept_last(store)
    assert store.folders() == ["step-0000000003"]


def test_a_file_of_somebody_else_stays_with_its_folder(store: Store) -> None:
    one = line(store, 1)
    line(store, 2, 3)
    other = "rank-00000.ffffffff.safetensors"
    for name in ("notes.txt", other):
        store.put(f"{one.folder}/{name}", b"mine")
    half_deleted(store, one)
    kept_last(store)
    assert [entry.name for entry in store.entries(one.folder)] == ["notes.txt", other]


def test_the_folder_of_a_save_that_may_be_running_stays(store: Store) -> None:
    """Going back leaves a newer child behind, whose parent's folder may be saved into again."""
    line(store, 1)
    gone = line(store, 2)
    samples.commit(store, 3, parent={"step": 2, "attempt": gone.id[1]}, tags={"aside": "back"})
    names = half_deleted(store, gone)
    kept_last(store)
    assert [entry.name for entry in store.entries(gone.folder)] == names


def test_looking_for_what_is_left_costs_no_request(store: Store) -> None:
    line(store, 1, 2, 3)
    kept_last(store)
    samples.commit(store, 9)  # a save that is under way
    store.delete("step-0000000009/manifest.json")
    counting = FaultyStore(store)
    kept_last(counting)
    asked = [name for name in counting.calls if name[0] in {"folders", "entries"}]
    assert asked == [("folders", "")]
