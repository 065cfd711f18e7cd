"""Thousands of generations of a remote root cost a few requests; a stale index costs no truth."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests import samples
from tests.faults import FaultyStore
from torch_ckpt.errors import FormatError, GenerationNotFound, IntegrityError, StorageError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.index import FRESH, forget, read_index, refresh_index, write_index
from torch_ckpt.generations.prune import prune
from torch_ckpt.generations.retention import KeepEvery, KeepLast
from torch_ckpt.generations.verify import verify
from torch_ckpt.manifest.commit import update_tags
from torch_ckpt.manifest.digest import canonical_json, sha256_hex
from torch_ckpt.manifest.layout import INDEX, folder_name, part_name
from torch_ckpt.manifest.parse import parse_index
from torch_ckpt.manifest.schema import StoredFile, Summary, dump_index
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.storage.store import Capabilities

SMALL = FRESH + 8


class Remote(FaultyStore):
    """A folder that says of itself that it is no file system, as a server's bucket does."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(files=False, random_access=False)


@pytest.fixture
def store(tmp_path: Path) -> Remote:
    return Remote(LocalStore(str(tmp_path / "run")))


def fill(store: Remote, count: int, *, ranks: int = 1, first: int = 1) -> list[int]:
    """Manifests alone, which is all that a listing looks at; the steps, newest first."""
    parts = [
        StoredFile(name=part_name(rank, "0123abcd"), bytes=10, sha256="a" * 64)
        for rank in range(ranks)
    ]
    steps = range(first, first + count)
    for step in steps:
        manifest = samples.manifest(
            parts,
            step=step,
            attempt=f"{step:08x}",
            bytes=step,
            metrics={"val_loss": step / 7},
            framework={"torch": "2.13.0"},
        )
        folder = Path(store.url, folder_name(step))
        folder.mkdir(parents=True)
        folder.joinpath("manifest.json").write_bytes(manifest.dump())  # fsync takes its time
    return list(reversed(steps))


def requests(store: Remote) -> Counter[str]:
    found = Counter(call for call, _ in store.calls)
    store.calls.clear()
    return found


def steps(found: list[Generation]) -> list[int]:
    return [one.step for one in found]


def test_thousands_of_generations_cost_a_few_requests(store: Remote) -> None:
    there = fill(store, 2_000, ranks=8)
    write_index(Catalog(store))
    fill(store, 3, ranks=8, first=2_001)
    requests(store)

    committed, damaged = Catalog(store).scan()

    assert steps(committed) == [2_003, 2_002, 2_001, *there]
    assert damaged == []
    assert requests(store) == {"folders": 1, "get": 1 + FRESH + 3}
    old = committed[-1]
    assert old.indexed is not None
    assert old.stored_bytes == 1 + 8 * 10
    assert old.manifest.metrics == {"val_loss": 1 / 7}
    assert len(store.store.get(INDEX, limit=1 << 30)) < 2_000 * 500
    assert Catalog(store).find(step=1).indexed is None
    assert len(Catalog(store).find(step=1).manifest.parts) == 8


def test_the_index_tells_all_that_manifests_tell_but_for_the_parts(store: Remote) -> None:
    fill(store, SMALL, first=10)
    mesh = {"shape": [2], "names": ["dp"]}
    parent = {"step": 9, "attempt": "0" * 8}
    facts = {"mesh": mesh, "parent": parent, "bases": (3, 4), "metrics": {"a": float("inf")}}
    samples.commit(store, 5, folder="epoch=0.ckpt", tags={"permanent": "x"}, **facts)
    before = {one.folder: one for one in Catalog(store).committed()}
    write_index(Catalog(store))
    after = {one.folder: one for one in Catalog(store).committed()}
    assert after.keys() == before.keys()
    assert sum(one.indexed is not None for one in after.values()) == len(after) - FRESH
    for folder, one in after.items():
        assert one.manifest.without_parts() == before[folder].manifest.without_parts()
        assert (one.id, one.url) == (before[folder].id, before[folder].url)
        assert one.stored_bytes == before[folder].stored_bytes
        assert Catalog(store).whole(one) == before[folder]
        if one.indexed is not None:
            assert one.manifest.parts == ()
            assert one.indexed.sha256 == before[folder].manifest.sha256


def test_small_and_local_roots_need_no_index(store: Remote, tmp_path: Path) -> None:
    fill(store, FRESH)
    write_index(Catalog(store))
    requests(store)
    assert len(Catalog(store).committed()) == FRESH
    assert requests(store) == {"folders": 1, "get": FRESH}
    local = LocalStore(str(tmp_path / "local"))
    samples.commit(local, 1)
    write_index(Catalog(local))
    forget(local, ["step-0000000001"])
    assert [entry.name for entry in local.entries("")] == ["LATEST"]


def test_a_deleted_folder_is_gone_whatever_the_index_says(store: Remote) -> None:
    fill(store, SMALL)
    write_index(Catalog(store))
    shutil.rmtree(Path(store.url, folder_name(2)))
    assert folder_name(2) in read_index(store)
    assert 2 not in steps(Catalog(store).committed())


def test_a_half_deleted_generation_is_gone_since_the_index_forgot_it_first(
    store: Remote,
) -> None:
    samples.commit(store, 1)
    fill(store, SMALL, first=2)
    write_index(Catalog(store))
    store.fail("delete_many", nth=1)
    with pytest.raises(StorageError):
        prune(Catalog(store), KeepLast(SMALL), run=None)
    assert store.entries(folder_name(1))
    assert 1 not in steps(Catalog(store).committed())


def test_tags_are_right_where_they_decide(store: Remote) -> None:
    fill(store, SMALL)
    catalog = Catalog(store)
    write_index(catalog)
    # One that rewrites the index, one that does not, and one among the newest.
    update_tags(store, folder_name(1), add={"permanent": "paper"})
    refresh_index(catalog, changed=[folder_name(1)])
    update_tags(store, folder_name(2), add={"permanent": "unheard of"})
    update_tags(store, folder_name(SMALL), add={"aside": ""})
    found = {one.step: one for one in catalog.committed()}
    assert found[1].tags == {"permanent": "paper"}
    assert found[1].indexed is not None
    assert found[SMALL].set_apart
    assert catalog.find(step=2).tags == {"permanent": "unheard of"}
    kept = {v.generation.step for v in prune(catalog, KeepLast(2), run=None) if v.kept}
    assert kept == {SMALL, SMALL - 1, SMALL - 2, 2, 1}
    assert set(steps(catalog.committed())) == kept


def test_prune_reads_what_it_deletes_and_not_what_it_keeps(store: Remote) -> None:
    fill(store, 4 * SMALL)
    write_index(Catalog(store))
    requests(store)
    asked: list[int] = []

    def pinned(one: Generation) -> str | None:
        asked.append(one.step)
        return "wanted" if one.step == 6 else None

    verdicts = prune(
        Catalog(store), KeepLast(4 * SMALL - 8) | KeepEvery(5), run=None, pinned=pinned
    )
    assert [v.generation.step for v in verdicts if not v.kept] == [8, 7, 4, 3, 2, 1]
    assert sorted(asked) == [1, 2, 3, 4, 6, 7, 8]
    # The index twice, the newest, what is dropped; for a deletion manifest, part and LATEST.
    assert requests(store)["get"] <= 2 + FRESH + 7 + 6 * 3


def test_deleting_by_hearsay_reads_the_manifest_first(store: Remote) -> None:
    samples.commit(store, 1, ranks=2)
    fill(store, SMALL, first=2)
    write_index(Catalog(store))
    catalog = Catalog(store)
    old = catalog.committed()[-1]
    assert old.step == 1
    assert old.indexed is not None
    assert verify(store, old).ok
    samples.commit(store, 1, attempt="ffffffff")
    with pytest.raises(GenerationNotFound, match="was replaced"):
        catalog.whole(old)
    catalog.delete(old)
    assert catalog.find(step=1).manifest.attempt == "ffffffff"
    catalog.delete(catalog.find(step=1))
    with pytest.raises(GenerationNotFound, match="not there any more"):
        catalog.whole(old)
    catalog.delete(old)


def test_roots_without_an_index_get_none_by_the_way(store: Remote) -> None:
    fill(store, 2)
    refresh_index(Catalog(store))
    forget(store, [folder_name(1)])
    assert store.entries("") == []


def test_an_index_that_cannot_be_used_is_as_good_as_none(store: Remote) -> None:
    there = fill(store, SMALL)
    write_index(Catalog(store))
    good = store.get(INDEX, limit=1 << 30)
    doc = json.loads(good)
    moved = json.loads(good)
    moved["generations"][0]["folder"] = "../elsewhere"
    body = {key: value for key, value in moved.items() if key != "sha256"}
    for bad in (
        b"",
        b"{",
        good[:-5],
        good.replace(b'"step":3,', b'"step":4,'),
        canonical_json({**doc, "format": "torch-ckpt/9"}),
        canonical_json({**body, "sha256": sha256_hex(canonical_json(body))}),
        b"[" * 100_000,
        store.get(f"{folder_name(1)}/manifest.json", limit=1 << 20),
    ):
        store.put(INDEX, bad)
        assert read_index(store) == {}
        assert steps(Catalog(store).committed()) == there
    store.put(INDEX, good)
    requests(store)
    assert steps(Catalog(store).committed()) == there
    assert requests(store)["get"] == 1 + FRESH


@pytest.mark.parametrize("damage", ["digest", "field", "number", "name"])
def test_the_parser_refuses_what_no_writer_wrote(damage: str) -> None:
    one = Summary(
        folder="a", manifest=samples.manifest().without_parts(), parts_bytes=1, sha256="a" * 64
    )
    data = dump_index([one])
    assert parse_index(data, file="INDEX.json") == [one]
    doc = json.loads(data)
    if damage == "digest":
        doc["generations"] = []
    else:
        change = {"field": ("more", 1), "number": ("parts_bytes", -1), "name": ("folder", "a/b")}
        key, value = change[damage]
        doc["generations"][0][key] = value
        body = {key: value for key, value in doc.items() if key != "sha256"}
        doc["sha256"] = sha256_hex(canonical_json(body))
    with pytest.raises(IntegrityError if damage == "digest" else FormatError):
        parse_index(canonical_json(doc), file="INDEX.json")


def test_storage_that_does_not_answer_is_no_empty_index(store: Remote) -> None:
    fill(store, SMALL)
    write_index(Catalog(store))
    store.fail("get", nth=1, error=StorageError("503 slow down"))
    with pytest.raises(StorageError, match="503"):
        Catalog(store).committed()


def test_a_server_that_fails_is_not_asked_ten_thousand_times(store: Remote) -> None:
    fill(store, 1000)
    requests(store)
    store.fail("get", nth=None, error=StorageError("503 slow down"))
    with pytest.raises(StorageError, match="503"):
        Catalog(store).committed()
    assert requests(store)["get"] < 100
