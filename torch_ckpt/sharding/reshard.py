"""Stored boxes into live ones: which bytes of a chunk go where, whatever the two shardings are.

Knows boxes, row-major order and tensors. Knows nothing of ranks, files or digests.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from torch_ckpt.manifest.entries import Chunk
from torch_ckpt.manifest.whole import StoredTensor
from torch_ckpt.staging.sharded import Box
from torch_ckpt.staging.snapshot import copy_exactly

_PIECE_BYTES = 1 << 20
"""A multiple of every element's bytes, so that a piece cuts none in two."""


class Delivery:
    """The part of one stored chunk that goes into one live tensor, taken block by block."""

    def __init__(self, chunk: Chunk, box: Box, target: torch.Tensor) -> None:
        """`box` is relative to the chunk; `target` has its shape."""
        for dim, stride in enumerate(target.stride()):
            if stride == 0 and target.shape[dim] > 1:
                # An expanded tensor holds one element many times: write it once.
                target = target.narrow(dim, 0, 1)
        self._target, self._item = target, target.element_size()
        self._box = Box(box.offsets, tuple(target.shape))
        self._shape, self._chunk_start = chunk.shape, chunk.start
        self._strides = _strides(chunk.shape)
        first = _dot(box.offsets, self._strides)
        last = first + _dot([n - 1 for n in self._box.shape], self._strides) + 1
        self.start = chunk.start + first * self._item
        """First byte that is needed, in the raw space of the part."""
        self.end = chunk.start + last * self._item
        """The end of the last one."""
        self._address = None
        if (
            _is_one_run(self._box.shape, chunk.shape)
            and target.device.type == "cpu"
            and target.is_contiguous()
            and not target.is_conj() | target.is_neg()
        ):
            self._address = target.data_ptr()

    def take(self, raw: torch.Tensor, start: int) -> None:
        """Copy what is needed of a block: its bytes, which begin at `start` of the raw space."""
        end = start + raw.numel()
        if self._address is not None:
            first, last = max(self.start, start), min(self.end, end)
            ctypes.memmove(
                self._address + first - self.start, raw.data_ptr() + first - start, last - first
            )
            return
        origin = self._chunk_start
        whole = math.prod(self._shape) * self._item
        # Blocks never cut an element in two.
        first, last = max(0, start - origin), min(whole, end - origin)
        run = raw[origin + first - start : origin + last - start]
        if run.storage_offset() % self._item:
            run = run.clone()
        typed = run.view(self._target.dtype)
        first, last = first // self._item, last // self._item
        for part in _boxes_of_run(self._shape, first, last):
            common = intersection(part, self._box)
            if common is None:
                continue
            begin = typed.storage_offset() + _dot(common.offsets, self._strides) - first
            source = typed.as_strided(common.shape, self._strides, begin)
            copy_exactly(_narrowed(self._target, common, self._box.offsets), source)


def overlapping(stored: StoredTensor, held: Box) -> Iterator[tuple[int, Chunk]]:
    """The chunks that have elements in the box `held` of the whole, each with its part.

    There may be thousands, of which a rank needs one.
    """
    dims = len(stored.shape)
    rows = np.asarray(stored.boxes, dtype=np.int64).reshape(len(stored.parts), 2 * dims)
    first = np.array(held.offsets, dtype=np.int64)
    last = first + np.array(held.shape, dtype=np.int64)
    offsets, ends = rows[:, :dims], rows[:, :dims] + rows[:, dims:]
    common = np.minimum(ends, last) > np.maximum(offsets, first)
    for number in np.flatnonzero(common.all(axis=1)).tolist():
        row = rows[number].tolist()
        start = stored.starts[number]
        chunk = Chunk(offsets=tuple(row[:dims]), shape=tuple(row[dims:]), start=start)
        yield stored.parts[number], chunk


def deliveries(chunk: Chunk, tensor: torch.Tensor, held: Box) -> Delivery | None:
    """What a live tensor, which is the box `held` of the whole, takes from a chunk, if anything."""
    stored = Box(chunk.offsets, chunk.shape)
    common = intersection(stored, held)
    if common is None:
        return None
    relative = tuple(o - c for o, c in zip(common.offsets, chunk.offsets, strict=True))
    return Delivery(chunk, Box(relative, common.shape), _narrowed(tensor, common, held.offsets))


def deliver(
    found: Iterable[Delivery], raw: torch.Tensor, start: int, forget: Callable[[], object] | None
) -> None:
    """Take a block: its bytes, which begin at `start` of the raw space.

    `forget` is called whenever a piece of them has been looked at.
    """
    if forget is None:
        for one in found:
            one.take(raw, start)
        return
    seen = 0
    for one in found:
        first, last = max(one.start - start, 0), min(one.end - start, raw.numel())
        for at in range(first, last, _PIECE_BYTES):
            piece = raw[at : min(at + _PIECE_BYTES, last)]
            one.take(piece, start + at)
            seen += piece.numel()
            if seen >= _PIECE_BYTES:
                forget()
                seen = 0


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    offsets, shape = [], []
    for a, n, b, m in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True):
        start, end = max(a, b), min(a + n, b + m)
        if end <= start:
            return None
        offsets.append(start)
        shape.append(end - start)
    return Box(tuple(offsets), tuple(shape))


def _narrowed(tensor: torch.Tensor, box: Box, origin: Sequence[int]) -> torch.Tensor:
    for dim, (offset, zero, length) in enumerate(zip(box.offsets, origin, box.shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset - zero, length)
    return tensor


def _boxes_of_run(shape: Sequence[int], first: int, last: int) -> Iterator[Box]:
    """Boxes that together are the elements from `first` up to `last` in row-major order."""
    if not shape:
        yield Box((), ())
        return
    inner = tuple(shape[1:])
    row = math.prod(inner)
    begin, skipped = divmod(first, row)
    end, rest = divmod(last, row)
    if begin == end:
        yield from _in_row(begin, inner, skipped, rest)
        return
    if skipped:
        yield from _in_row(begin, inner, skipped, row)
        begin += 1
    if end > begin:
        yield Box((begin, *[0] * len(inner)), (end - begin, *inner))
    if rest:
        yield from _in_row(end, inner, 0, rest)


def _in_row(index: int, inner: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    for box in _boxes_of_run(inner, first, last):
        yield Box((index, *box.offsets), (1, *box.shape))


def _strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return strides[::-1]


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _is_one_run(box: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box of a row-major array is one run of memory."""
    first = next((dim for dim, length in enumerate(box) if length > 1), len(box))
    return all(a == b for a, b in zip(box[first + 1 :], shape[first + 1 :], strict=True))
