"""Tables of blocks and tensors: as good as their entries, and no more is let in than one by one."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import samples
from tests.unit.manifest.test_parse import PART as PLAIN
from tests.unit.manifest.test_parse import paths, put
from tests.unit.manifest.test_parse_encoded import PART as ENCODED
from torch_ckpt.errors import FormatError
from torch_ckpt.manifest.columns import block_table, tensor_table
from torch_ckpt.manifest.entries import Chunk, TensorEntry
from torch_ckpt.manifest.index import CODECS, blocks_one_by_one, tensors_one_by_one
from torch_ckpt.manifest.packed import Unpacking, pack
from torch_ckpt.manifest.parse import parse_part
from torch_ckpt.manifest.schema import Part
from torch_ckpt.manifest.tables import BlockTable, TensorTable
from torch_ckpt.manifest.whole import check_parts

MANY_CHUNKS = replace(
    PLAIN,
    rank=1,
    world_size=2,
    aliases={"tied": "\ud800"},
    per_rank={"rng": {"$tuple": [1]}},
    tree=None,
    tensors=(
        TensorEntry(name="none here", dtype="bool", shape=(3,), chunks=()),
        TensorEntry(
            name="\ud800",
            dtype="int64",
            shape=(2, 4),
            chunks=(
                Chunk(offsets=(0, 0), shape=(1, 4), start=8),
                Chunk(offsets=(1, 0), shape=(1, 0), start=0),
                Chunk(offsets=(1, 2), shape=(1, 2), start=40),
            ),
        ),
        TensorEntry(
            name="scalar", dtype="int64", shape=(), chunks=(Chunk(offsets=(), shape=(), start=0),)
        ),
    ),
)
EMPTY = replace(PLAIN, blocks=(), tensors=(), tree=None)
PARTS = [PLAIN, ENCODED, MANY_CHUNKS, EMPTY]


@pytest.mark.parametrize("part", PARTS)
def test_a_table_is_as_good_as_its_entries(part: Part) -> None:
    for entries, table in (
        (part.blocks, BlockTable.of(part.blocks)),
        (part.bases, BlockTable.of(part.bases)),
        (part.tensors, TensorTable.of(part.tensors)),
    ):
        assert table == entries
        assert entries == table
        assert [table[number] for number in range(len(table))] == list(entries)
        assert table[1:] == tuple(entries[1:])
        assert table[-1:] == tuple(entries[-1:])
        assert pickle.loads(pickle.dumps(table)) == entries
        assert table != [*entries, None]
        with pytest.raises(IndexError):
            table[len(entries)]
    assert part.block_starts()[-1] == sum(block.raw_bytes for block in part.blocks)


def test_parts_come_back_from_bytes_one_after_the_other() -> None:
    data = bytearray(b"".join(map(pack, [*PARTS, PLAIN])))
    found = list(Unpacking().parts(memoryview(data)))
    assert found == [*PARTS, PLAIN]
    assert [part.dump() for part in found] == [part.dump() for part in [*PARTS, PLAIN]]
    # What ranks have in common is there once.
    first, last = (TensorTable.of(found[number].tensors) for number in (0, -1))
    assert first.heads is last.heads


VALUES = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([None, True, 2.0, 1 << 40, 1 << 62, 1 << 70, "raw", "zstd", "delta", "a" * 64]),
    st.sampled_from([[], [0], [1, 2], [3.0], [True], {}, {"offsets": [0]}, "A" * 64, " " * 64]),
    st.integers(0, 1 << 13).map(lambda number: number * 4),
)


def _changed(part: Part, key: str, data: st.DataObject) -> list[Any]:
    """A list of a part with a few other values, or an entry twice."""
    docs: Any = json.loads(part.dump())[key]
    for _ in range(data.draw(st.integers(0, 2))):
        if places := paths(docs)[1:]:
            put(*data.draw(st.sampled_from(places)), data.draw(VALUES))(docs)
    if docs and data.draw(st.booleans()):
        docs.insert(data.draw(st.integers(0, len(docs))), data.draw(st.sampled_from(docs)))
    return docs


@given(st.sampled_from([PLAIN, ENCODED]), st.data())
def test_blocks_are_sound_as_columns_only_if_they_are_one_by_one(
    part: Part, data: st.DataObject
) -> None:
    docs = _changed(part, "blocks", data)
    sizes = [one.bytes for one in (*part.files, *part.borrowed)]
    bases = part.bases if part.encoded else None
    table = block_table(docs, sizes, bases, CODECS)
    if table is not None:
        assert table == blocks_one_by_one(docs, sizes, bases, "x")
        return
    with pytest.raises(FormatError):
        blocks_one_by_one(docs, sizes, bases, "x")


@given(st.sampled_from([PLAIN, ENCODED]), st.data())
def test_tensors_are_sound_as_columns_only_if_they_are_one_by_one(
    part: Part, data: st.DataObject
) -> None:
    docs = _changed(part, "tensors", data)
    raw_bytes = part.block_starts()[-1]
    table = tensor_table(docs, raw_bytes)
    if table is not None:
        assert table == tensors_one_by_one(docs, raw_bytes, "x")
        return
    with pytest.raises(FormatError):
        tensors_one_by_one(docs, raw_bytes, "x")


def test_an_empty_chunk_beyond_all_numbers_is_refused() -> None:
    doc = json.loads(PLAIN.dump())
    empty = next(tensor for tensor in doc["tensors"] if 0 in tensor["shape"])
    empty["chunks"][0]["start"] = 1 << 62
    with pytest.raises(FormatError, match="absurd"):
        parse_part(json.dumps(doc).encode(), file="x")


def test_tensors_of_all_parts_are_found_with_their_chunks() -> None:
    made = [
        replace(
            samples.image({}).part,
            rank=rank,
            world_size=2,
            files=(),
            tree=None,
            tensors=tuple(
                TensorEntry(name=name, dtype="uint8", shape=(4,), chunks=chunks)
                for name, chunks in tensors.items()
            ),
        )
        for rank, tensors in enumerate(
            [
                {"a": _rows((0, 2)), "b": _rows((0, 1), (3, 1)), "c": _rows((0, 4))},
                {"b": _rows((1, 2)), "a": _rows((2, 2)), "c": ()},
            ]
        )
    ]
    manifest = samples.manifest(world_size=2, bytes=0)
    found = check_parts(manifest, made[::-1], "x")
    assert [part.rank for part in found.parts] == [0, 1]
    places = {
        name: (one.boxes.tolist(), one.parts.tolist(), one.starts.tolist())
        for name, one in found.tensors.items()
    }
    assert places == {
        "a": ([0, 2, 2, 2], [0, 1], [0, 0]),
        "b": ([0, 1, 3, 1, 1, 2], [0, 0, 1], [0, 1, 0]),
        "c": ([0, 4], [0], [0]),
    }


def _rows(*rows: tuple[int, int]) -> tuple[Chunk, ...]:
    return tuple(
        Chunk(offsets=(first,), shape=(count,), start=number)
        for number, (first, count) in enumerate(rows)
    )


def test_a_scalar_that_two_parts_hold_is_stored_twice() -> None:
    scalar = MANY_CHUNKS.tensors[2]
    files = PLAIN.files[0]
    parts = [
        replace(
            PLAIN,
            rank=rank,
            world_size=2,
            files=(replace(files, name=f"rank-{rank}.safetensors"),),
            tensors=(replace(scalar, name="once"), scalar) if rank == 0 else (scalar,),
        )
        for rank in range(2)
    ]
    manifest = samples.manifest(world_size=2, bytes=2 * files.bytes)
    with pytest.raises(FormatError, match="'scalar' has 1 elements, its chunks 2"):
        check_parts(manifest, parts, "x")
