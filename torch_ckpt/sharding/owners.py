"""Which rank writes which box: each box once, bytes balanced over those that hold it.

Pure functions of what all ranks know, so that every rank comes to the same answer by itself.
Knows boxes and sizes. Knows nothing of tensors, groups or storage.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from torch_ckpt.sharding.tiling import tiled
from torch_ckpt.staging.sharded import Box

SMALL_BYTES = 1 << 20
"""Smaller boxes go to the first of their ranks while it has no more than its share: what differs
between replicas by accident is then one rank's version."""

_PIECES_PER_SHARE = 10
"""No piece that several ranks could write is more than this part of a rank's fair share."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A box of a tensor, and the ranks that hold it."""

    tensor: int
    """Position among the tensors that ranks share."""
    box: Box
    ranks: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """What all ranks hold of the tensors that are shared out over them, a row for every box.

    Rows are in order of rank.
    """

    tensor: np.ndarray
    """Positions among the tensors that ranks share."""
    rank: np.ndarray
    boxes: np.ndarray
    """Offsets, then lengths, padded with zeros and ones to the most dimensions there are."""


@dataclass(frozen=True, slots=True)
class Found:
    """The different boxes that all ranks hold, as far as one rank has to know them."""

    alone: list[Claim]
    """What only this rank holds."""
    shared: list[Claim]
    """What several ranks hold, whichever they are."""
    loads: list[int]
    """By rank, the bytes that only it holds."""
    elements: list[int]
    """By tensor, of all different boxes together."""
    tiled: list[bool]
    """By tensor, whether the different boxes hold each of its elements, and no two the same."""


def claims(
    held: Held,
    shapes: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
    *,
    rank: int,
    world_size: int,
) -> Found:
    """The different boxes, in an order that all ranks agree on, as `rank` needs them.

    Empty boxes are left out, but for the first one of a tensor without any element. A thousand
    ranks hold a million boxes: only those that this rank may come to write become objects.
    """
    table = _distinct(held)
    dims = [len(shape) for shape in shapes]
    elements = np.zeros(len(dims), dtype=np.int64)
    np.add.at(elements, table.tensor, table.elements)
    wanted = table.elements > 0
    hollow = np.flatnonzero(elements[table.tensor] == 0)
    _, first = np.unique(table.tensor[hollow], return_index=True)
    wanted[hollow[first]] = True
    sizes = table.elements * np.asarray(itemsizes, dtype=np.int64)[table.tensor]
    alone = wanted & (table.ends - table.starts == 1)
    holder = table.rank[table.starts]
    loads = np.zeros(world_size, dtype=np.int64)
    np.add.at(loads, holder[alone], sizes[alone])
    return Found(
        _made(table, np.flatnonzero(alone & (holder == rank)), sizes, dims),
        _made(table, np.flatnonzero(wanted & ~alone), sizes, dims),
        loads.tolist(),
        elements.tolist(),
        tiled(table.tensor, table.boxes, shapes),
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """A row for every different box, and the ranks that hold it."""

    tensor: np.ndarray
    boxes: np.ndarray
    elements: np.ndarray
    starts: np.ndarray
    """Where the ranks of a box begin in `rank`."""
    ends: np.ndarray
    rank: np.ndarray


def _distinct(held: Held) -> _Table:
    # The sort is stable, and rows come in order of rank.
    order = np.lexsort((*held.boxes.T[::-1], held.tensor))
    tensor, box = held.tensor[order], held.boxes[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (tensor[1:] != tensor[:-1]) | (box[1:] != box[:-1]).any(axis=1)
    starts = np.flatnonzero(new)
    boxes = box[starts]
    elements = boxes[:, boxes.shape[1] // 2 :].prod(axis=1)
    ends = np.append(starts[1:], len(order))[: len(starts)]
    return _Table(tensor[starts], boxes, elements, starts, ends, held.rank[order])


def _made(table: _Table, rows: np.ndarray, sizes: np.ndarray, dims: Sequence[int]) -> list[Claim]:
    half = table.boxes.shape[1] // 2
    ranks = table.rank.tolist() if len(rows) else []
    same: dict[tuple[int, ...], tuple[int, ...]] = {}
    made = []
    for index, box, size, start, end in zip(
        table.tensor[rows].tolist(),
        table.boxes[rows].tolist(),
        sizes[rows].tolist(),
        table.starts[rows].tolist(),
        table.ends[rows].tolist(),
        strict=True,
    ):
        dim = dims[index]
        holders = tuple(ranks[start:end])
        holders = same.setdefault(holders, holders)  # a few sets of ranks hold all that is shared
        made.append(
            Claim(index, Box(tuple(box[:dim]), tuple(box[half : half + dim])), holders, size)
        )
    return made


def assign(
    shared: Sequence[Claim], loads: Sequence[int], *, of_first: Collection[int] = ()
) -> list[tuple[int, Claim]]:
    """An owner for every claim of several ranks. Large ones may come back in pieces.

    The largest first, each to the least loaded of its ranks. A rank's load is at most a tenth
    above the mean where enough of the bytes are held by several ranks.

    Args:
        shared: Claims of several ranks each, or of the only rank there is.
        loads: By rank, the bytes that it has to write anyway.
        of_first: Tensors of which the first rank's version counts, whatever its load.
    """
    loads = list(loads)
    if len(loads) == 1:
        return [(0, claim) for claim in shared]
    owned: list[tuple[int, Claim]] = []
    share = (sum(loads) + sum(claim.bytes for claim in shared)) // len(loads)
    limit = max(SMALL_BYTES, share // _PIECES_PER_SHARE)
    # The smallest first, while rank 0 has room: that is what buffers are which data parallelism
    # leaves different on each rank, and by custom those of rank 0 count.
    bound = [claim for claim in shared if claim.tensor in of_first]
    for claim in bound:
        loads[claim.ranks[0]] += claim.bytes
    owned += [(claim.ranks[0], claim) for claim in bound]
    shared = [claim for claim in shared if claim.tensor not in of_first]
    small = sorted((c for c in shared if c.bytes < SMALL_BYTES), key=_smallest_first)
    large = [piece for c in shared if c.bytes >= SMALL_BYTES for piece in _cut(c, limit)]
    for claim in [*small, *sorted(large, key=_largest_first)]:
        first = claim.ranks[0]
        if claim.bytes >= SMALL_BYTES or loads[first] + claim.bytes > share:
            first = min(claim.ranks, key=loads.__getitem__)
        loads[first] += claim.bytes
        owned.append((first, claim))
    return owned


def _largest_first(claim: Claim) -> tuple[object, ...]:
    return (-claim.bytes, claim.tensor, claim.box.offsets)


def _smallest_first(claim: Claim) -> tuple[object, ...]:
    return (claim.bytes, claim.tensor, claim.box.offsets)


def _cut(claim: Claim, limit: int) -> list[Claim]:
    """Runs of rows of about `limit` bytes: row-major, so each is one run of memory."""
    box = claim.box
    dim = next((d for d, length in enumerate(box.shape) if length > 1), None)
    if claim.bytes <= limit or dim is None:
        return [claim]
    pieces = min(box.shape[dim], -(-claim.bytes // limit))
    edges = [box.shape[dim] * n // pieces for n in range(pieces + 1)]
    row_bytes = claim.bytes // box.shape[dim]
    cut = []
    for start, end in pairwise(edges):
        offsets, shape = list(box.offsets), list(box.shape)
        offsets[dim] += start
        shape[dim] = end - start
        part = Box(tuple(offsets), tuple(shape))
        cut.append(Claim(claim.tensor, part, claim.ranks, row_bytes * (end - start)))
    return cut


def whole(tensor: int, shape: Sequence[int], itemsize: int, world_size: int) -> Claim:
    """The claim of a tensor that every rank has all of."""
    box = Box((0,) * len(shape), tuple(shape))
    return Claim(tensor, box, tuple(range(world_size)), math.prod(shape) * itemsize)
