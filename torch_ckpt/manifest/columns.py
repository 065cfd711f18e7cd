"""The long lists of a part checked column by column, which takes a fraction of one by one.

What is sound here is sound one by one as well. Where something is not, `manifest.index` has to
look, which says what is wrong. Knows the documents of blocks and tensors. Knows nothing of which
codecs there are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, compress, pairwise, repeat
from operator import add, eq, itemgetter, le, lt, mod, mul
from typing import Any

from torch_ckpt.manifest.dtypes import DTYPES
from torch_ckpt.manifest.entries import BLOCK_BYTES, Block
from torch_ckpt.manifest.tables import (
    SHA256_BYTES,
    XXH3_BYTES,
    BlockTable,
    Heads,
    TensorTable,
    by_kind,
    numbers,
)

MAX_DIMENSIONS = 64
"""What torch can hold."""

MAX_LENGTH = 1 << 62
"""Lengths, offsets and the bytes of a tensor stay below this."""

block_fields = itemgetter("file", "offset", "bytes", "raw_bytes", "sha256", "xxh3", "codec")
tensor_fields = itemgetter("name", "dtype", "shape", "chunks")
chunk_fields = itemgetter("offsets", "shape", "start")
_base = itemgetter("base")
_flat = chain.from_iterable

_Unsound = (LookupError, TypeError, ValueError, OverflowError)
"""What odd values lead to on the way, whatever they are."""


def block_table(
    docs: Sequence[Any],
    sizes: Sequence[int],
    bases: Sequence[Block] | None,
    codecs: Mapping[str, bool],
) -> BlockTable | None:
    """The blocks in `docs`, none of which overlaps another one; None if any may be unsound.

    Args:
        sizes: Bytes of the files that they lie in.
        bases: None in the format without them.
        codecs: Those there are, and whether each needs a base.
    """
    if not docs:
        return BlockTable.of(())
    try:
        return _blocks(docs, sizes, bases, codecs)
    except _Unsound:
        return None


def _blocks(
    docs: Sequence[Any],
    sizes: Sequence[int],
    bases: Sequence[Block] | None,
    codecs: Mapping[str, bool],
) -> BlockTable | None:
    file, offset, stored, raw, sha256, xxh3, codec = zip(*map(block_fields, docs), strict=True)
    kinds, which = by_kind(codec)
    hashes = _digests(sha256, SHA256_BYTES), _digests(xxh3, XXH3_BYTES)
    based = _bases(docs, raw, codec, bases, codecs) if bases is not None else ()
    sound = (
        set(map(len, docs)) == {7 if bases is None else 8}
        and set(map(type, _flat((file, offset, stored, raw)))) == {int}
        and min(file) >= 0
        and min(offset) >= 0
        and min(stored) >= 1
        and all(map(le, map(add, offset, stored), map(sizes.__getitem__, file)))
        and min(raw) >= 1
        and max(raw) <= BLOCK_BYTES
        and set(map(type, kinds)) == {str}
        and codecs.keys() >= set(kinds)
        and (bases is not None or kinds == ("raw",))
        and (
            "raw" not in kinds
            or all(compress(map(eq, stored, raw), map(kinds.index("raw").__eq__, which)))
        )
        and None not in hashes
        and based is not None
        and _apart(docs, file, offset, stored, twins=bases is not None)
    )
    if not sound:
        return None
    return BlockTable(
        file=numbers(file),
        offset=numbers(offset),
        bytes=numbers(stored),
        raw_bytes=numbers(raw),
        sha256=memoryview(hashes[0] or b""),
        xxh3=memoryview(hashes[1] or b""),
        codecs=kinds,
        codec=memoryview(which),
        base=numbers(based or ()),
    )


def _digests(digests: Sequence[str], size: int) -> bytes | None:
    if set(map(type, digests)) != {str} or set(map(len, digests)) != {2 * size}:
        return None
    text = "".join(digests)
    data = bytes.fromhex(text)
    return data if data.hex() == text else None  # white space or capital letters


def _bases(
    docs: Sequence[Any],
    raw: Sequence[int],
    codec: Sequence[str],
    bases: Sequence[Block],
    codecs: Mapping[str, bool],
) -> Iterable[int] | None:
    """Of every block its base or -1, nothing if none has one; None if any may be unsound."""
    column = list(map(_base, docs))
    has = [base is not None for base in column]
    if has != list(map(codecs.__getitem__, codec)):
        return None
    if not any(has):
        return ()
    for base, size in compress(zip(column, raw, strict=True), has):
        if type(base) is not int or not 0 <= base < len(bases) or bases[base].raw_bytes != size:
            return None
    return [-1 if base is None else base for base in column]


def _apart(
    docs: Sequence[Any],
    file: Sequence[int],
    offset: Sequence[int],
    stored: Sequence[int],
    *,
    twins: bool,
) -> bool:
    """Whether no block overlaps another one, but for `twins` if these are allowed."""
    if len(set(file)) == 1 and all(map(le, map(add, offset, stored), offset[1:])):
        return True
    places = sorted(zip(file, offset, stored, range(len(docs)), strict=True))
    return all(
        one[0] != other[0]
        or one[1] + one[2] <= other[1]
        or (twins and docs[one[3]] == docs[other[3]])
        for one, other in pairwise(places)
    )


def tensor_table(docs: Sequence[Any], raw_bytes: int) -> TensorTable | None:
    """The tensors in `docs`, which tile a raw space of that size; None if any may be unsound."""
    if not docs:
        return None if raw_bytes else TensorTable.of(())
    try:
        return _tensors(docs, raw_bytes)
    except _Unsound:
        return None


def _tensors(docs: Sequence[Any], raw_bytes: int) -> TensorTable | None:
    names, dtypes, shapes, chunks = zip(*map(tensor_fields, docs), strict=True)
    kinds, which = by_kind(dtypes)
    items = [DTYPES[dtype].itemsize for dtype in dtypes]
    dims = list(map(len, shapes))
    sound = (
        set(map(len, docs)) == {4}
        and set(map(type, names)) == {str}
        and len(set(names)) == len(names)
        and set(map(type, _flat((shapes, chunks)))) == {list}
        and max(dims) <= MAX_DIMENSIONS
        and _are_lengths(_flat(shapes))
        and all(map(lt, map(mul, map(math.prod, shapes), items), repeat(MAX_LENGTH)))
    )
    if not sound:
        return None
    heads = Heads.made(
        tuple(map(sys.intern, names)),
        kinds,
        memoryview(which),
        memoryview(bytes(dims)),
        numbers(_flat(shapes)),
    )
    return _with_chunks(heads, shapes, items, chunks, raw_bytes)


def _with_chunks(
    heads: Heads,
    wholes: Sequence[list[int]],
    items: Sequence[int],
    chunks: Sequence[list[Any]],
    raw_bytes: int,
) -> TensorTable | None:
    counts = list(map(len, chunks))
    docs = list(_flat(chunks))
    columns = zip(*map(chunk_fields, docs), strict=True) if docs else ((), (), ())
    offsets, shapes, starts = map(list, columns)
    whole = list(_flat(map(repeat, wholes, counts)))
    itemsize = list(_flat(map(repeat, items, counts)))
    dims = list(map(len, whole))
    sound = (
        set(map(len, docs)) <= {3}
        and set(map(type, _flat((offsets, shapes)))) <= {list}
        and list(map(len, offsets)) == dims
        and list(map(len, shapes)) == dims
        and _are_lengths(_flat(_flat((offsets, shapes))))
        and all(map(le, map(add, _flat(offsets), _flat(shapes)), _flat(whole)))
        and set(map(type, starts)) <= {int}
        and not any(map(mod, starts, itemsize))
        and _fill(starts, list(map(mul, map(math.prod, shapes), itemsize)), raw_bytes)
    )
    if not sound:
        return None
    return TensorTable.made(
        heads,
        numbers(counts),
        numbers(_flat(_flat(zip(offsets, shapes, strict=True)))),
        numbers(starts),
    )


def _are_lengths(values: Iterable[Any]) -> bool:
    """Whether all of them are whole numbers from 0 up."""
    found = list(values)
    return not found or (
        set(map(type, found)) == {int} and min(found) >= 0 and max(found) < MAX_LENGTH
    )


def _fill(starts: Sequence[int], lengths: Sequence[int], raw_bytes: int) -> bool:
    """Whether runs of bytes, some perhaps empty, fill a space without gaps and overlaps."""
    if min(starts, default=0) < 0 or max(starts, default=0) >= MAX_LENGTH:
        return False
    spans = sorted(compress(zip(starts, lengths, strict=True), lengths))
    edges = list(accumulate((length for _, length in spans), initial=0))
    return [start for start, _ in spans] == edges[:-1] and edges[-1] == raw_bytes
