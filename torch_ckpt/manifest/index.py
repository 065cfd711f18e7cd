"""The long lists of a part, blocks and tensors, checked: as columns, or one by one if one is wrong.

Every block lies in its file and touches no other; the chunks of the tensors tile the raw space
exactly. Knows the schema. Knows nothing of stores or of the other fields of a part.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from operator import add, attrgetter, gt
from typing import Any, NoReturn

from torch_ckpt.codecs.names import NAMES, NEED_BASE
from torch_ckpt.errors import FormatError
from torch_ckpt.manifest.columns import (
    MAX_DIMENSIONS,
    MAX_LENGTH,
    block_fields,
    block_table,
    chunk_fields,
    tensor_fields,
    tensor_table,
)
from torch_ckpt.manifest.dtypes import DTYPES
from torch_ckpt.manifest.entries import BLOCK_BYTES, Block, Chunk, TensorEntry
from torch_ckpt.manifest.schema import Vote
from torch_ckpt.manifest.tables import BlockTable, TensorTable

CODECS = {"raw": False, **{name: name in NEED_BASE for name in NAMES}}
"""The codecs that this version decodes, and whether each needs a base."""

WIDEST_BYTES = max(kind.itemsize for kind in DTYPES.values())

MAX_CHAIN = 256
"""Bases behind one another; whoever reads a block decodes them all."""

_SHA256 = re.compile(r"[0-9a-f]{64}").fullmatch
_XXH3 = re.compile(r"[0-9a-f]{16}").fullmatch


class _Wrong(Exception):
    """What is wrong with one entry; becomes a FormatError that names the entry."""


def parse_blocks(
    docs: list[Any], vote: Vote, bases: Sequence[Block] | None, *, file: str
) -> BlockTable:
    """The blocks of a part that begins with `vote`; `bases` is None in the format without them.

    Raises:
        FormatError: a block is malformed, outside its file, or overlaps another one.
    """
    sizes = _sizes(vote)
    table = block_table(docs, sizes, bases, CODECS)
    return BlockTable.of(blocks_one_by_one(docs, sizes, bases, file)) if table is None else table


def blocks_one_by_one(
    docs: list[Any], sizes: Sequence[int], bases: Sequence[Block] | None, file: str
) -> list[Block]:
    """The same for files of these sizes, slowly, to the first one that is wrong."""
    blocks: list[Block] = []
    for index, doc in enumerate(docs):
        try:
            blocks.append(_block(doc, sizes, bases))
        except (_Wrong, KeyError, TypeError) as error:
            _refuse(file, f"block {index}", error)
    ends, last = [0] * len(sizes), None
    for block in sorted(blocks, key=attrgetter("file", "offset")):
        # One whose bytes are those of another one is stored once.
        if block.offset < ends[block.file] and (bases is None or block != last):
            _refuse(file, f"the block at byte {block.offset}", _Wrong("overlaps another block"))
        ends[block.file], last = block.offset + block.bytes, block
    return blocks


def parse_bases(docs: list[Any], vote: Vote, *, file: str) -> tuple[Block, ...]:
    """The bases of a part that begins with `vote`: each decodes with those before it alone.

    Raises:
        FormatError: one is malformed, or is not in a shard of an earlier generation.
    """
    sizes = _sizes(vote)
    bases: list[Block] = []
    depths: list[int] = []
    for index, doc in enumerate(docs):
        try:
            base = _block(doc, sizes, bases)
            if base.file < len(vote.files):
                raise _Wrong("lies in the part's own file")
            depths.append(1 if base.base is None else depths[base.base] + 1)
            if depths[-1] > MAX_CHAIN:
                raise _Wrong(f"is the end of a chain of more than {MAX_CHAIN}")
        except (_Wrong, KeyError, TypeError) as error:
            _refuse(file, f"base {index}", error)
        bases.append(base)
    return tuple(bases)


def _sizes(vote: Vote) -> list[int]:
    return [one.bytes for one in (*vote.files, *vote.borrowed)]


def parse_tensors(docs: list[Any], raw_bytes: int, *, file: str) -> TensorTable:
    """The tensors of a part whose raw space has `raw_bytes` bytes.

    Raises:
        FormatError: an entry is malformed, or the chunks do not tile the raw space.
    """
    table = tensor_table(docs, raw_bytes)
    return TensorTable.of(tensors_one_by_one(docs, raw_bytes, file)) if table is None else table


def tensors_one_by_one(docs: list[Any], raw_bytes: int, file: str) -> list[TensorEntry]:
    """The same slowly, to the first one that is wrong."""
    tensors: list[TensorEntry] = []
    names = set()
    spans: list[tuple[int, int]] = []
    for index, doc in enumerate(docs):
        try:
            tensor = _tensor(doc, spans)
            if tensor.name in names:
                raise _Wrong(f"{tensor.name!r} was there before")
        except (_Wrong, KeyError, TypeError) as error:
            _refuse(file, f"tensor {index}", error)
        names.add(tensor.name)
        tensors.append(tensor)
    spans.sort()
    end = 0
    for start, length in spans:
        if start != end:
            reason = "overlap" if start < end else "leave a gap"
            _refuse(file, "the raw space", _Wrong(f"chunks {reason} at byte {min(start, end)}"))
        end += length
    if end != raw_bytes:
        _refuse(file, "the raw space", _Wrong(f"chunks fill {end} bytes, blocks {raw_bytes}"))
    return tensors


def check_cuts(blocks: BlockTable, tensors: TensorTable, *, file: str) -> None:
    """Check that blocks end between elements, so that each one can be read without its neighbour.

    Raises:
        FormatError: a block cuts an element in two.
    """
    odd = [edge for edge in blocks.starts() if edge % WIDEST_BYTES]
    if not odd:
        return
    chunks = tensors.runs()
    for edge in odd:
        start, itemsize = chunks[bisect_left(chunks, (edge,)) - 1]
        if (edge - start) % itemsize:
            _refuse(file, "the raw space", _Wrong(f"a block cuts an element in two at byte {edge}"))


def _refuse(file: str, what: str, error: Exception) -> NoReturn:
    reason = str(error) if isinstance(error, _Wrong) else f"lacks or mistypes a field ({error!r})"
    raise FormatError(file=file, reason=f"{what}: {reason[:200]}") from error


def _block(doc: dict[str, Any], sizes: Sequence[int], bases: Sequence[Block] | None) -> Block:
    index, offset, stored, raw, sha256, xxh3, codec = block_fields(doc)
    if len(doc) != (7 if bases is None else 8):
        raise _Wrong("has fields that this version does not know")
    if not type(index) is type(offset) is type(stored) is type(raw) is int:
        raise _Wrong("file, offset, bytes and raw_bytes must be whole numbers")
    if not 0 <= index < len(sizes):
        raise _Wrong(f"file {index} is not one of the part's {len(sizes)}")
    if offset < 0 or stored < 1 or offset + stored > sizes[index]:
        raise _Wrong(f"{stored} bytes at {offset} do not lie in a file of {sizes[index]} bytes")
    if not 1 <= raw <= BLOCK_BYTES:
        raise _Wrong(f"raw_bytes is {raw}, not 1 to {BLOCK_BYTES}")
    if type(codec) is not str or codec not in CODECS:
        raise _Wrong(f"codec {codec!r} is not one of {', '.join(sorted(CODECS))}")
    if codec == "raw" and stored != raw:
        raise _Wrong(f"stores {stored} bytes and says they are {raw}")
    if _SHA256(sha256) is None or _XXH3(xxh3) is None:
        raise _Wrong("sha256 or xxh3 is not lower-case hex of the right length")
    return Block(
        base=_base(doc, raw, codec, bases),
        file=index,
        offset=offset,
        bytes=stored,
        raw_bytes=raw,
        sha256=sha256,
        xxh3=xxh3,
        codec=codec,
    )


def _base(doc: dict[str, Any], raw: int, codec: str, bases: Sequence[Block] | None) -> int | None:
    if bases is None:
        if codec != "raw":
            raise _Wrong(f"codec {codec!r} is not one of this format version")
        return None
    base = doc["base"]
    if (base is not None) != CODECS[codec]:
        raise _Wrong(f"codec {codec!r} comes with base {base!r}")
    if base is None:
        return None
    if type(base) is not int or not 0 <= base < len(bases):
        raise _Wrong(f"base {base!r} is not one of the {len(bases)} that come before it")
    if bases[base].raw_bytes != raw:
        raise _Wrong(f"its base has {bases[base].raw_bytes} raw bytes instead of {raw}")
    return base


def _tensor(doc: dict[str, Any], spans: list[tuple[int, int]]) -> TensorEntry:
    """The tensor in `doc`; the bytes its chunks take are appended to `spans`."""
    name, dtype, shape, chunks = tensor_fields(doc)
    if len(doc) != 4:
        raise _Wrong("has fields that this version does not know")
    if type(name) is not str or type(shape) is not list or type(chunks) is not list:
        raise _Wrong("name must be a string, shape and chunks arrays")
    if type(dtype) is not str or dtype not in DTYPES:
        raise _Wrong(f"dtype {dtype!r} is not known")
    itemsize = DTYPES[dtype].itemsize
    if len(shape) > MAX_DIMENSIONS:
        raise _Wrong(f"{len(shape)} dimensions are more than {MAX_DIMENSIONS}")
    _check_dimensions(shape)
    if math.prod(shape) * itemsize >= MAX_LENGTH:
        raise _Wrong(f"shape {shape} is absurd")
    return TensorEntry(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        chunks=tuple([_chunk(chunk, shape, itemsize, spans) for chunk in chunks]),
    )


def _chunk(
    doc: dict[str, Any], whole: list[int], itemsize: int, spans: list[tuple[int, int]]
) -> Chunk:
    offsets, shape, start = chunk_fields(doc)
    if len(doc) != 3:
        raise _Wrong("a chunk has fields that this version does not know")
    if type(offsets) is not list or type(shape) is not list or type(start) is not int:
        raise _Wrong("a chunk's offsets and shape must be arrays, its start a whole number")
    _check_dimensions(offsets + shape)
    if not len(offsets) == len(shape) == len(whole):
        raise _Wrong(f"a chunk of {shape} at {offsets} is not of the {len(whole)} dimensions")
    if any(map(gt, map(add, offsets, shape), whole)):
        raise _Wrong(f"a chunk of {shape} at {offsets} is outside of {whole}")
    if start >= MAX_LENGTH:
        raise _Wrong(f"a chunk starts at byte {start}, which is absurd")
    if start < 0 or start % itemsize:
        raise _Wrong(f"a chunk starts at byte {start}, no multiple of its {itemsize}-byte items")
    length = math.prod(shape) * itemsize
    if length:
        spans.append((start, length))
    return Chunk(offsets=tuple(offsets), shape=tuple(shape), start=start)


def _check_dimensions(lengths: list[Any]) -> None:
    if lengths and (
        set(map(type, lengths)) != {int} or min(lengths) < 0 or max(lengths) >= MAX_LENGTH
    ):
        raise _Wrong("shapes and offsets must be whole numbers from 0 up")
