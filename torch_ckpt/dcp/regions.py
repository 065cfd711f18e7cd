"""Boxes of stored tensors, read into tensors: only the blocks they touch, each one verified first.

Knows blocks, chunks and tensors in memory. Knows nothing of plans, planners or documents.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.autograd.graph import increment_version

from torch_ckpt.generations.read import BlockReader
from torch_ckpt.manifest.entries import BLOCK_BYTES, Chunk
from torch_ckpt.staging.snapshot import copy_exactly

_THREADS = min(8, 2 * (os.cpu_count() or 1))
_LANDING_BYTES = 64 << 20
"""What does not go straight into its tensor lands in pieces of at most about this size."""
_GROUP_BYTES = 256 << 20
"""Landings that are in memory at once."""
_SPARSE_BYTES = 1 << 20
"""Rows that lie further apart than this are fetched one by one: there may be blocks between."""


@dataclass(frozen=True)
class Box:
    """A box inside a stored chunk, and the tensor of the same shape that it goes to."""

    reader: BlockReader
    chunk: Chunk
    dtype: torch.dtype
    offsets: tuple[int, ...]
    """Of its first element in the chunk."""
    target: torch.Tensor


@dataclass
class _Route:
    """A run of the raw space and the memory it goes to, on the CPU, contiguous."""

    reader: BlockReader
    start: int
    memory: torch.Tensor
    deliver: tuple[torch.Tensor, torch.Tensor] | None = None
    """Source and target, if the memory is not the target's own."""


def read_boxes(boxes: Iterable[Box]) -> None:
    """Fill every target.

    Raises:
        IntegrityError: stored bytes are not the ones that were written; a target may be filled in
            part, with verified bytes only.
        FileNotFoundError: a shard is not there.
    """
    scratch = threading.local()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-read") as pool:
        for group in _groups(_routes(boxes)):
            _fetch(group, pool, scratch)
            for route in group:
                if route.deliver is not None:
                    _deliver(*route.deliver)


def _routes(boxes: Iterable[Box]) -> Iterator[_Route]:
    for box in sorted(boxes, key=lambda one: (one.reader.part.rank, one.chunk.start)):
        if box.target.numel():
            # First, and even if reading fails: moved bytes leave no other trace for autograd.
            if not box.target.is_inference():
                increment_version(box.target)
            yield from _split(box, tuple(box.target.shape), box.offsets, box.target)


def _split(
    box: Box, shape: tuple[int, ...], offsets: tuple[int, ...], target: torch.Tensor
) -> Iterator[_Route]:
    """One route for a box, or several for slices of it."""
    itemsize = box.dtype.itemsize
    strides = _strides(box.chunk.shape)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    dense = span == target.numel()
    start = box.chunk.start + first * itemsize
    if dense and _is_plain(target, box.dtype):
        yield _Route(box.reader, start, _bytes_of(target))
        return
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    row_bytes = 0 if dim is None else strides[dim] * itemsize
    sparse = not dense and row_bytes >= _SPARSE_BYTES
    if dim is not None and (sparse or span * itemsize > _LANDING_BYTES):
        rows = 1 if sparse else max(1, _LANDING_BYTES // row_bytes)
        for begin in range(0, shape[dim], rows):
            count = min(rows, shape[dim] - begin)
            yield from _split(
                box,
                (*shape[:dim], count, *shape[dim + 1 :]),
                (*offsets[:dim], offsets[dim] + begin, *offsets[dim + 1 :]),
                target.narrow(dim, begin, count),
            )
        return
    landing = torch.empty(span, dtype=box.dtype)
    source = landing.as_strided(shape, strides)
    yield _Route(box.reader, start, _bytes_of(landing), (source, target))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = [1, *accumulate(reversed(shape[1:]), lambda left, right: left * right)]
    return tuple(reversed(sizes[: len(shape)]))


def _is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether stored bytes are what the target's memory must hold."""
    return (
        target.device.type == "cpu"
        and target.dtype is dtype
        and target.is_contiguous()
        and not target.is_conj() | target.is_neg()
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # Not reshape: one element, or a row of one, is contiguous whatever its strides are.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _groups(routes: Iterable[_Route]) -> Iterator[list[_Route]]:
    group: list[_Route] = []
    landed = 0
    for route in routes:
        size = route.memory.numel() if route.deliver is not None else 0
        if group and landed + size > _GROUP_BYTES:
            yield group
            group, landed = [], 0
        group.append(route)
        landed += size
    if group:
        yield group


def _fetch(routes: list[_Route], pool: ThreadPoolExecutor, scratch: threading.local) -> None:
    """Read every block that the routes touch once, and hand out its bytes."""
    wanted: dict[tuple[int, int], tuple[BlockReader, list[_Route]]] = {}
    for route in routes:
        for block in route.reader.blocks_for(route.start, route.memory.numel()):
            wanted.setdefault((id(route.reader), block), (route.reader, []))[1].append(route)
    futures = [
        pool.submit(_read_block, scratch, reader, block, takers)
        for (_, block), (reader, takers) in wanted.items()
    ]
    try:
        for future in futures:
            future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _read_block(
    scratch: threading.local, reader: BlockReader, index: int, takers: Iterable[_Route]
) -> None:
    if not hasattr(scratch, "buffer"):
        scratch.buffer = memoryview(bytearray(BLOCK_BYTES))
    raw = torch.frombuffer(reader.read(index, scratch.buffer), dtype=torch.uint8)
    start, end = reader.starts[index], reader.starts[index + 1]
    for route in takers:
        first = max(start, route.start)
        last = min(end, route.start + route.memory.numel())
        ctypes.memmove(
            route.memory.data_ptr() + first - route.start,
            raw.data_ptr() + first - start,
            last - first,
        )


def _deliver(source: torch.Tensor, target: torch.Tensor) -> None:
    # An expanded tensor holds one element many times; writing it once is writing it everywhere.
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    if source.dtype is target.dtype:
        copy_exactly(target, source)
    else:
        target.copy_(source)  # a target of another dtype is converted to, as DCP does
