"""The long lists of a part, blocks and tensors, as columns of numbers instead of objects.

A generation of many ranks has millions of entries, of which a reader looks at few. A table gives
an entry when it is asked for. Knows entries. Knows nothing of documents or of what makes an entry
right; whoever makes a table has checked that.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeVar, overload

from torch_ckpt.manifest.dtypes import DTYPES
from torch_ckpt.manifest.entries import Block, Chunk, TensorEntry

SHA256_BYTES, XXH3_BYTES = 32, 8

_Entry = TypeVar("_Entry")


def numbers(values: Iterable[int]) -> memoryview:
    """A column of 64-bit numbers; raises OverflowError for one that does not fit."""
    return memoryview(array("q", values))


def by_kind(values: Sequence[str]) -> tuple[tuple[str, ...], bytes]:
    """The different ones among few kinds of values, and for each value which of them it is."""
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(values))}
    return tuple(kinds), bytes(map(kinds.__getitem__, values))


class _Table(Sequence[_Entry]):
    """What the two tables have in common: they are as good as a tuple of their entries."""

    @abstractmethod
    def _entry(self, index: int) -> _Entry: ...

    @overload
    def __getitem__(self, index: int) -> _Entry: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[_Entry, ...]: ...

    def __getitem__(self, index: int | slice) -> _Entry | tuple[_Entry, ...]:
        if isinstance(index, slice):
            return tuple(map(self._entry, range(*index.indices(len(self)))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index} is not one of {len(self)} entries")
        return self._entry(index % len(self))

    def __iter__(self) -> Iterator[_Entry]:
        return map(self._entry, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"{type(self).__name__}.of({tuple(self)!r})"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class BlockTable(_Table[Block]):
    """Blocks; every field is a column."""

    file: memoryview
    offset: memoryview
    bytes: memoryview
    raw_bytes: memoryview
    sha256: memoryview
    """Of all blocks, back to back, and not as hex digits."""
    xxh3: memoryview
    codecs: tuple[str, ...]
    codec: memoryview
    """Which of `codecs`."""
    base: memoryview
    """-1 for none; the column is empty if there is none anywhere."""

    @classmethod
    def of(cls, blocks: Sequence[Block], /) -> BlockTable:
        """The same blocks as a table."""
        if isinstance(blocks, cls):
            return blocks
        codecs, codec = by_kind([one.codec for one in blocks])
        based = any(one.base is not None for one in blocks)
        return cls(
            file=numbers(one.file for one in blocks),
            offset=numbers(one.offset for one in blocks),
            bytes=numbers(one.bytes for one in blocks),
            raw_bytes=numbers(one.raw_bytes for one in blocks),
            sha256=memoryview(bytes.fromhex("".join(one.sha256 for one in blocks))),
            xxh3=memoryview(bytes.fromhex("".join(one.xxh3 for one in blocks))),
            codecs=codecs,
            codec=memoryview(codec),
            base=numbers(-1 if one.base is None else one.base for one in blocks if based),
        )

    @property
    def coded(self) -> bool:
        """Whether any block is stored otherwise than it is."""
        return any(name != "raw" for name in self.codecs)

    def starts(self) -> list[int]:
        """First raw byte of every block, and the end of the last one."""
        return list(accumulate(self.raw_bytes, initial=0))

    def __len__(self) -> int:
        return len(self.file)

    def __reduce__(self) -> tuple[object, ...]:
        return BlockTable.of, (tuple(self),)

    def _entry(self, index: int) -> Block:
        base = self.base[index] if self.base else -1
        return Block(
            file=self.file[index],
            offset=self.offset[index],
            bytes=self.bytes[index],
            raw_bytes=self.raw_bytes[index],
            sha256=self.sha256[index * SHA256_BYTES : (index + 1) * SHA256_BYTES].hex(),
            xxh3=self.xxh3[index * XXH3_BYTES : (index + 1) * XXH3_BYTES].hex(),
            codec=self.codecs[self.codec[index]],
            base=None if base < 0 else base,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Heads:
    """What tensors are; ranks that share a state out have equal ones, which are kept once."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    dtype: memoryview
    """Which of `dtypes`."""
    dims: memoryview
    """Number of dimensions."""
    shapes: memoryview
    """Global, one after the other."""
    shape_at: memoryview
    """Where the shape of a tensor begins, and the end of the last one."""
    box_at: memoryview
    """The same of boxes, where every tensor has one chunk."""

    @classmethod
    def made(
        cls,
        names: tuple[str, ...],
        dtypes: tuple[str, ...],
        dtype: memoryview,
        dims: memoryview,
        shapes: memoryview,
    ) -> Heads:
        """What these columns say."""
        return cls(
            names=names,
            dtypes=dtypes,
            dtype=dtype,
            dims=dims,
            shapes=shapes,
            shape_at=numbers(accumulate(dims, initial=0)),
            box_at=numbers(accumulate((2 * length for length in dims), initial=0)),
        )

    def alike(self, other: Heads) -> bool:
        """Whether the two are of the same tensors in the same order."""
        return self is other or (
            self.names == other.names
            and self.dtypes == other.dtypes
            and self.dtype == other.dtype
            and self.dims == other.dims
            and self.shapes == other.shapes
        )

    def dtype_of(self, index: int) -> str:
        """Element type of a tensor."""
        return self.dtypes[self.dtype[index]]

    def shape(self, index: int) -> tuple[int, ...]:
        """Global shape of a tensor."""
        return tuple(self.shapes[self.shape_at[index] : self.shape_at[index + 1]])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class TensorTable(_Table[TensorEntry]):
    """Tensors with their chunks."""

    heads: Heads
    counts: memoryview
    """Chunks by tensor."""
    boxes: memoryview
    """Of every chunk its offsets, then its shape."""
    starts: memoryview
    """Of every chunk its first byte in the raw space."""
    chunk_at: Sequence[int]
    """Where the chunks of a tensor begin, and the end of the last one."""
    box_at: Sequence[int]

    @classmethod
    def made(
        cls, heads: Heads, counts: memoryview, boxes: memoryview, starts: memoryview
    ) -> TensorTable:
        """A table of these columns."""
        chunk_at, box_at = range(len(counts) + 1), heads.box_at
        if set(counts) - {1}:
            sizes = (2 * dims * count for dims, count in zip(heads.dims, counts, strict=True))
            chunk_at, box_at = (numbers(accumulate(c, initial=0)) for c in (counts, sizes))
        return cls(
            heads=heads,
            counts=counts,
            boxes=boxes,
            starts=starts,
            chunk_at=chunk_at,
            box_at=box_at,
        )

    @classmethod
    def of(cls, tensors: Sequence[TensorEntry], /) -> TensorTable:
        """The same tensors as a table."""
        if isinstance(tensors, cls):
            return tensors
        dtypes, dtype = by_kind([one.dtype for one in tensors])
        chunks = [chunk for one in tensors for chunk in one.chunks]
        heads = Heads.made(
            tuple(one.name for one in tensors),
            dtypes,
            memoryview(dtype),
            memoryview(bytes(len(one.shape) for one in tensors)),
            numbers(chain.from_iterable(one.shape for one in tensors)),
        )
        return cls.made(
            heads,
            numbers(len(one.chunks) for one in tensors),
            numbers(chain.from_iterable((*one.offsets, *one.shape) for one in chunks)),
            numbers(one.start for one in chunks),
        )

    @property
    def one_each(self) -> bool:
        """Whether every tensor has one chunk."""
        return isinstance(self.chunk_at, range)

    def runs(self) -> list[tuple[int, int]]:
        """Of every chunk that is not empty its first byte and its bytes an element, in order."""
        found, at = [], 0
        for index, count in enumerate(self.counts):
            itemsize, dims = DTYPES[self.heads.dtype_of(index)].itemsize, self.heads.dims[index]
            for chunk in range(self.chunk_at[index], self.chunk_at[index] + count):
                if 0 not in self.boxes[at + dims : at + 2 * dims]:
                    found.append((self.starts[chunk], itemsize))
                at += 2 * dims
        return sorted(found)

    def __len__(self) -> int:
        return len(self.counts)

    def __reduce__(self) -> tuple[object, ...]:
        return TensorTable.of, (tuple(self),)

    def _entry(self, index: int) -> TensorEntry:
        dims, at = self.heads.dims[index], self.box_at[index]
        chunks = []
        for start in self.starts[self.chunk_at[index] : self.chunk_at[index + 1]]:
            offsets = tuple(self.boxes[at : at + dims])
            chunks.append(
                Chunk(
                    offsets=offsets, shape=tuple(self.boxes[at + dims : at + 2 * dims]), start=start
                )
            )
            at += 2 * dims
        return TensorEntry(
            name=self.heads.names[index],
            dtype=self.heads.dtype_of(index),
            shape=self.heads.shape(index),
            chunks=tuple(chunks),
        )
