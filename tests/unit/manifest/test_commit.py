"""Documents are published whole, read back with every check, and checked against each other."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import samples
from tests.faults import FaultyStore
from torch_ckpt.errors import FormatError, IntegrityError, StorageError
from torch_ckpt.manifest.commit import (
    check_parts,
    collect_vote,
    publish_manifest,
    publish_part,
    read_manifest,
    read_part,
    read_parts,
    update_tags,
)
from torch_ckpt.manifest.entries import Chunk, TensorEntry
from torch_ckpt.manifest.schema import Manifest, Part, Vote
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(str(tmp_path))


def test_a_committed_generation_reads_back(store: Store) -> None:
    committed = samples.commit(store, 5, ranks=2)
    manifest = read_manifest(store, committed.folder)
    assert manifest == committed.manifest
    parts = read_parts(store, committed.folder, manifest)
    assert [part.rank for part in parts] == [0, 1]
    assert store.get("LATEST", limit=99) == b"step-0000000005\n"


def test_no_manifest_is_file_not_found_and_silent_storage_is_not(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        read_manifest(store, "step-0000000001")
    faulty = FaultyStore(store)
    faulty.fail("get", error=StorageError("503"))
    with pytest.raises(StorageError):
        read_manifest(faulty, "step-0000000001")


def test_a_collected_vote_is_that_of_the_published_part(store: Store) -> None:
    store.make_folder("g")
    # A state may use our own words as its keys, and a value may look like the end of a part.
    odd = {"per_rank": {"$tuple": [1]}, 'x,"per_rank":{}}': ',"blocks":[', "blocks": []}
    made = samples.image(samples.arrays()).part
    for part in (made, replace(made, per_rank=odd, tree={"per_rank": odd, "z": {"per_rank": {}}})):
        stored = publish_part(store, "g", part)
        assert collect_vote(store, "g", stored.name) == (
            stored,
            Vote(
                step=part.step,
                attempt=part.attempt,
                run=part.run,
                rank=0,
                world_size=1,
                files=part.files,
            ),
        )


def test_a_torn_part_is_no_vote_wherever_it_was_cut(store: Store) -> None:
    store.make_folder("g")
    odd = {"per_rank": {"a": {}}, "b": [{}]}
    part = replace(samples.image(samples.arrays()).part, per_rank=odd, tree=odd)
    stored = publish_part(store, "g", part)
    path = Path(store.url, "g", stored.name)
    data = path.read_bytes()
    assert collect_vote(store, "g", "rank-00001.0123abcd.json") is None
    for size in (*range(0, len(data), 7), *range(len(data) - 200, len(data))):
        path.write_bytes(data[:size])
        assert collect_vote(store, "g", stored.name) is None, size
        path.write_bytes(data[:size] + bytes(len(data) - size))
        assert collect_vote(store, "g", stored.name) is None, size
    path.write_bytes(data[:1000] + bytes(512) + data[1512:])
    assert collect_vote(store, "g", stored.name) is None


@pytest.mark.parametrize(
    "document",
    [
        b'{"per_rank":{},"per_rank":{}}',
        b'{"format":"torch-ckpt/1","kind":"part","blocks":[],"per_rank":{}}',
        b'{"format":"torch-ckpt/9","blocks":[],"per_rank":{}}',
        b'[1,"blocks":[],"per_rank":{}}',
    ],
)
def test_a_whole_document_that_is_no_part_is_refused_at_the_vote(
    store: Store, document: bytes
) -> None:
    store.make_folder("g")
    store.put("g/rank-00000.0123abcd.json", document)
    with pytest.raises(FormatError):
        collect_vote(store, "g", "rank-00000.0123abcd.json")


def test_a_vote_is_read_without_the_tensors(store: Store) -> None:
    """A thousand parts of a thousand tensors each must take seconds, not minutes."""
    store.make_folder("g")
    many = {f"layer.{i}.weight": np.zeros(1, np.float32) for i in range(2000)}
    stored = publish_part(store, "g", samples.image(many).part)
    assert stored.bytes > 200_000
    tracemalloc.start()
    collect_vote(store, "g", stored.name)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * stored.bytes  # its tensors as values take twenty times as much


def test_what_a_reader_would_refuse_is_never_published(store: Store) -> None:
    part = samples.image(samples.arrays()).part
    store.make_folder("g")
    with pytest.raises(FormatError):
        publish_part(store, "g", replace(part, aliases={"tied": "nowhere"}))
    odd = replace(part.tensors[0], name="nowhere", shape=(3,), chunks=())
    with pytest.raises(FormatError, match="its chunks 0"):
        publish_part(store, "g", replace(part, tensors=(*part.tensors, odd)))
    with pytest.raises(FormatError):
        publish_manifest(store, "g", samples.manifest(step=-1))
    assert store.entries("g") == []


def test_a_changed_truncated_or_missing_part_is_named(store: Store) -> None:
    committed = samples.commit(store, 5)
    (stored,) = committed.manifest.parts
    path = Path(store.url, committed.folder, stored.name)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b" ")
    with pytest.raises(IntegrityError, match=rf"{stored.name}.*SHA-256"):
        read_part(store, committed.folder, stored)
    path.write_bytes(data[:100])
    with pytest.raises(IntegrityError, match="it has 100 bytes"):
        read_part(store, committed.folder, stored)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_part(store, committed.folder, stored)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m, p: (replace(m, step=9), p), "step is 9"),
        (lambda m, p: (replace(m, attempt="ffffffff"), p), "attempt"),
        (lambda m, p: (replace(m, run="other"), p), "run is 'other'"),
        (lambda m, p: (replace(m, world_size=3), p), "world_size is 3"),
        (lambda m, p: (m, p[:1]), "ranks [0]"),
        (lambda m, p: (m, [p[0], p[0]]), "ranks [0, 0]"),
        (lambda m, p: (replace(m, bytes=1), p), "its shards have 1 bytes"),
        (lambda m, p: (m, [p[0], replace(p[1], files=p[0].files)]), "several parts"),
        (lambda m, p: (m, [p[0], replace(p[1], tensors=p[0].tensors)]), "more than once"),
        (lambda m, p: (m, [p[0], replace(p[1], aliases={"a": "b"})]), "no tensor"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    store: Store,
    change: Callable[[Manifest, list[Part]], tuple[Manifest, list[Part]]],
    says: str,
) -> None:
    committed = samples.commit(store, 5, ranks=2)
    parts = read_parts(store, committed.folder, committed.manifest)
    with pytest.raises(FormatError) as caught:
        check_parts(*change(committed.manifest, parts), "the-manifest")
    assert says in str(caught.value)


def in_rows(part: Part, rows: list[tuple[int, int]], shape: tuple[int, int]) -> Part:
    """A part that holds these rows, by their first and their number, of one tensor."""
    chunks = tuple(
        Chunk(offsets=(first, 0), shape=(count, shape[1]), start=0) for first, count in rows
    )
    return replace(
        part, tensors=(TensorEntry(name="t", dtype="uint8", shape=shape, chunks=chunks),)
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([(0, 2), (4, 2)], [(2, 2), (4, 2)]),  # rows 4 and 5 twice, 6 and 7 never
        ([(0, 5)], [(4, 3)]),
        ([(1, 4)], [(0, 3), (7, 1)]),
        ([(0, 4), (0, 4)], []),
    ],
)
def test_chunks_that_overlap_and_leave_as_much_out_are_refused(
    store: Store, first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    committed = samples.commit(store, 5, ranks=2)
    one, other = read_parts(store, committed.folder, committed.manifest)
    for parts in ([one, other], [other, one]):
        torn = [in_rows(parts[0], first, (8, 3)), in_rows(parts[1], second, (8, 3))]
        with pytest.raises(FormatError, match="tensor 't' has chunks that overlap"):
            check_parts(committed.manifest, torn, "the-manifest")
    whole = [in_rows(one, [(4, 2), (0, 4)], (8, 3)), in_rows(other, [(6, 2), (3, 0)], (8, 3))]
    check_parts(committed.manifest, whole, "the-manifest")


def test_one_part_whose_chunks_overlap_is_never_published(store: Store) -> None:
    store.make_folder("g")
    part = samples.image({"t": np.arange(24, dtype=np.uint8).reshape(8, 3)}).part
    torn = in_rows(part, [(0, 4), (0, 4)], (8, 3)).tensors[0]
    chunks = tuple(replace(c, start=12 * n) for n, c in enumerate(torn.chunks))
    with pytest.raises(FormatError, match="tensor 't' has chunks that overlap"):
        publish_part(store, "g", replace(part, tensors=(replace(torn, chunks=chunks),)))
    assert store.entries("g") == []


def test_an_alias_may_lead_to_a_tensor_of_another_rank(store: Store) -> None:
    committed = samples.commit(store, 5, ranks=2)
    first, second = read_parts(store, committed.folder, committed.manifest)
    tied = replace(first, aliases={"tied": second.tensors[0].name})
    check_parts(committed.manifest, [tied, second], "x")


def test_tags_are_replaced_as_a_whole(store: Store) -> None:
    committed = samples.commit(store, 5, tags={"suspect": "loss spike"})
    update_tags(store, committed.folder, add={"permanent": "paper"}, drop=["suspect", "absent"])
    assert read_manifest(store, committed.folder).tags == {"permanent": "paper"}
    faulty = FaultyStore(store)
    faulty.fail("put")
    with pytest.raises(StorageError):
        update_tags(faulty, committed.folder, add={"aside": "went back"})
    assert read_manifest(store, committed.folder).tags == {"permanent": "paper"}
    update_tags(faulty, committed.folder, add={"permanent": "paper"})
    assert [call for call, _ in faulty.calls].count("put") == 1  # nothing new, nothing written
