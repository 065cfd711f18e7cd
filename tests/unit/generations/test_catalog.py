"""A generation exists if and only if its manifest does, and is deleted in that order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import samples
from tests.faults import FaultyStore
from torch_ckpt.errors import GenerationNotFound, StorageError
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.litter import litter, sweep
from torch_ckpt.generations.verify import verify
from torch_ckpt.manifest.commit import MANIFEST_LIMIT_BYTES, update_tags
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(str(tmp_path))


def latest(store: Store) -> str:
    return store.get("LATEST", limit=99).decode().strip()


def files(store: Store, folder: str) -> set[str]:
    return {entry.name for entry in store.entries(folder)}


def test_committed_lists_by_step_then_name_whatever_the_clock_says(store: Store) -> None:
    samples.commit(store, 20)
    samples.commit(store, 100, folder="epoch=1-step=100.ckpt")
    samples.commit(store, 100, folder="best.ckpt")
    samples.commit(store, 3)
    os.utime(Path(store.url, "step-0000000003"), (4e9, 4e9))
    found = Catalog(store).committed()
    assert [one.step for one in found] == [100, 100, 20, 3]
    assert [one.folder for one in found[:2]] == ["best.ckpt", "epoch=1-step=100.ckpt"]
    assert found[2].url == f"{store.url}/step-0000000020"


def test_folders_without_a_manifest_are_no_generations(store: Store) -> None:
    gone = samples.commit(store, 1)
    store.delete("step-0000000001/manifest.json")
    Path(store.url, "my notes").mkdir()
    catalog = Catalog(store)
    assert catalog.scan() == ([], [])
    with pytest.raises(GenerationNotFound, match="nothing is committed"):
        catalog.find(step=gone.step)


def test_damaged_manifests_are_listed_with_a_reason_and_stop_nobody(store: Store) -> None:
    samples.commit(store, 1)
    for step in (2, 3, 4, 5):
        samples.commit(store, step)
    root = Path(store.url)
    (root / "step-0000000002/manifest.json").write_bytes(b"{")
    with (root / "step-0000000003/manifest.json").open("r+b") as file:
        file.truncate(MANIFEST_LIMIT_BYTES + 1)
    for step in (4, 5):
        (root / f"step-000000000{step}/manifest.json").unlink()
    (root / "step-0000000004/manifest.json").symlink_to("/etc/hostname")
    (root / "step-0000000005/manifest.json").mkdir()
    catalog = Catalog(store)
    assert [one.step for one in catalog.committed()] == [1]
    reasons = dict(catalog.damaged())
    assert "not JSON" in reasons["step-0000000002"]
    assert "bytes" in reasons["step-0000000003"]
    assert "regular file" in reasons["step-0000000004"]
    assert "regular file" in reasons["step-0000000005"]


@pytest.mark.parametrize("operation", ["folders", "get"])
def test_storage_that_does_not_answer_is_never_absence(store: Store, operation: str) -> None:
    samples.commit(store, 1)
    faulty = FaultyStore(store)
    faulty.fail(operation, nth=None, error=StorageError("503 slow down"))
    with pytest.raises(StorageError, match="503"):
        Catalog(faulty).committed()


def test_find_says_what_there_is_nearby(store: Store) -> None:
    for step in (100, 200, 300, 400, 500, 600):
        samples.commit(store, step)
    catalog = Catalog(store)
    assert catalog.find(step=300).folder == "step-0000000300"
    assert catalog.find(folder="step-0000000200").step == 200
    assert catalog.find().step == 600
    with pytest.raises(GenerationNotFound, match=r"step 250.*300 \(.*200 \(.*and 1 more"):
        catalog.find(step=250)
    with pytest.raises(GenerationNotFound, match="holds step 200, not 5"):
        catalog.find(step=5, folder="step-0000000200")
    with pytest.raises(FileNotFoundError, match="'nope'"):
        catalog.find(folder="nope")


def test_find_prefers_what_is_not_set_aside(store: Store) -> None:
    samples.commit(store, 5, folder="a", tags={"aside": "went back"})
    samples.commit(store, 5, folder="b")
    assert Catalog(store).find(step=5).folder == "b"


def test_delete_removes_the_manifest_first_and_leaves_nothing(store: Store) -> None:
    samples.commit(store, 1)
    doomed = samples.commit(store, 2, ranks=2)
    faulty = FaultyStore(store)
    Catalog(faulty).delete(doomed)
    deleted = [name for call, name in faulty.calls if call == "delete"]
    assert deleted[0] == "step-0000000002/manifest.json"
    assert len(deleted) == 5
    assert store.folders() == ["step-0000000001"]
    assert latest(store) == "step-0000000001"


def test_delete_stopped_anywhere_leaves_the_generation_or_litter(store: Store) -> None:
    for nth in range(1, 5):
        samples.commit(store, 1, attempt=f"0000000{nth}")
        doomed = samples.commit(store, 2, attempt=f"1000000{nth}")
        faulty = FaultyStore(store)
        faulty.fail("delete", nth=nth)
        if nth <= 3:
            with pytest.raises(StorageError):
                Catalog(faulty).delete(doomed)
        else:
            Catalog(faulty).delete(doomed)
        catalog = Catalog(store)
        for one in catalog.committed():
            assert verify(store, one).ok
        assert len(catalog.committed()) == (2 if nth == 1 else 1)
        sweep(store, doomed.folder)
        for one in catalog.committed():
            catalog.delete(one)


def test_delete_touches_no_file_that_the_generation_does_not_name(store: Store) -> None:
    doomed = samples.commit(store, 2)
    folder = Path(store.url, doomed.folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "rank-00000.ffffffff.safetensors").write_text("of another attempt")
    Catalog(store).delete(doomed)
    assert files(store, doomed.folder) == {"notes.txt", "rank-00000.ffffffff.safetensors"}
    with pytest.raises(FileNotFoundError):
        store.get("LATEST", limit=99)


def test_delete_spares_shards_that_another_generation_links(store: Store) -> None:
    first = samples.commit(store, 2, attempt="aaaaaaaa", folder="first")
    second = samples.commit(store, 2, attempt="aaaaaaaa", folder="second")
    shard = "rank-00000.aaaaaaaa.safetensors"
    store.delete(f"second/{shard}")
    store.link(f"first/{shard}", f"second/{shard}")
    Catalog(store).delete(first)
    assert store.folders() == ["second"]
    assert verify(store, second).ok


def test_delete_of_a_replaced_generation_spares_its_successor(store: Store) -> None:
    old = samples.commit(store, 2, folder="last.ckpt")
    new = samples.commit(store, 3, folder="last.ckpt")
    Catalog(store).delete(old)
    assert Catalog(store).find(folder="last.ckpt").id == new.id
    assert verify(store, new).ok
    assert len(files(store, "last.ckpt")) == 3
    assert latest(store) == "last.ckpt"


def test_delete_frees_the_shards_of_a_part_that_is_damaged(store: Store) -> None:
    for damage in ("truncate", "unlink"):
        doomed = samples.commit(store, 2)
        part = Path(store.url, doomed.folder, doomed.manifest.parts[0].name)
        os.truncate(part, 5) if damage == "truncate" else part.unlink()
        Catalog(store).delete(doomed)
        assert store.folders() == []


def test_latest_never_names_what_is_set_apart(store: Store) -> None:
    samples.commit(store, 1)
    samples.commit(store, 2)
    doomed = samples.commit(store, 3)
    update_tags(store, "step-0000000002", add={"damaged": "bit rot"})
    Catalog(store).delete(doomed)
    assert latest(store) == "step-0000000001"


def test_litter_is_what_a_save_made_and_no_manifest_names(store: Store) -> None:
    kept = samples.commit(store, 1)
    crashed = samples.commit(store, 2, attempt="cccccccc")
    store.delete(f"{crashed.folder}/manifest.json")
    stray = "rank-00000.dddddddd.safetensors.0a0a.tmp"
    for folder in (kept.folder, crashed.folder):
        Path(store.url, folder, stray).write_text("half")
        Path(store.url, folder, "notes.txt").write_text("mine")
    Path(store.url, crashed.folder, "manifest.json.0a0a0a0a.tmp").write_text("half")
    names = litter(store, store.folders())
    assert f"{kept.folder}/{stray}" in names
    assert len(names) == 1 + 4
    spared = sweep(store, crashed.folder, spare=lambda one: one == "cccccccc")
    assert len(spared) == 2
    sweep(store, crashed.folder)
    assert files(store, crashed.folder) == {"notes.txt"}
    sweep(store, kept.folder)
    assert verify(store, kept).ok
    assert "notes.txt" in files(store, kept.folder)


def test_an_empty_folder_goes_unless_a_save_may_be_about_to_fill_it(store: Store) -> None:
    store.make_folder("step-0000000009")
    Path(store.url, "somebody's").mkdir()
    sweep(store, "step-0000000009", spare=lambda one: one == "cccccccc")
    sweep(store, "somebody's")
    assert store.folders() == ["somebody's", "step-0000000009"]
    sweep(store, "step-0000000009")
    assert store.folders() == ["somebody's"]


@pytest.mark.parametrize("victim", ["manifest.json", "part"])
def test_nothing_is_swept_where_nobody_can_tell_what_belongs(store: Store, victim: str) -> None:
    kept = samples.commit(store, 1)
    name = kept.manifest.parts[0].name if victim == "part" else victim
    os.truncate(Path(store.url, kept.folder, name), 10)
    before = files(store, kept.folder)
    assert sweep(store, kept.folder) == []
    assert files(store, kept.folder) == before
