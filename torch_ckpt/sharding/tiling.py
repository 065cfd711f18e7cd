"""Whether what all ranks hold of each tensor is that tensor: nothing twice, and nothing missing.

The same as `manifest.tiling`, where the reason is, for a million boxes at once. Knows boxes as rows
of numbers. Knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_PRIME = np.uint64((1 << 31) - 1)
"""Products of two numbers below it fit 64 bits."""


def tiled(tensor: np.ndarray, boxes: np.ndarray, shapes: Sequence[Sequence[int]]) -> list[bool]:
    """By tensor, whether its boxes, all inside of it and different, hold each element once.

    All ranks come to the same answer. Boxes that tile always pass; others by a chance of about 1
    in 2 ** 60, which nobody can choose: they come from this job, not from outside.

    Args:
        tensor: Of each box, the position of its tensor in `shapes`.
        boxes: Offsets, then lengths, padded with zeros and ones to the most dimensions there are.
    """
    most = boxes.shape[1] // 2
    padded = [[*[0] * most, *shape, *[1] * (most - len(shape))] for shape in shapes]
    # Tensors of more dimensions than any box have none, and are nobody's question.
    wholes = np.array([row[: 2 * most] for row in padded], dtype=np.int64)
    good = np.ones(len(shapes), dtype=bool)
    for draw in range(2):
        sums = np.zeros(len(shapes), dtype=np.uint64)
        np.add.at(sums, tensor, _corners(boxes, draw))
        good &= sums % _PRIME == _corners(wholes, draw)
    return good.tolist()


def _corners(boxes: np.ndarray, draw: int) -> np.ndarray:
    """The sum over the signed corners of each box, with a number for each coordinate."""
    most = boxes.shape[1] // 2
    product = np.ones(len(boxes), dtype=np.uint64)
    for dim in range(most):
        first = boxes[:, dim]
        low, high = (
            _number(edge, 64 * draw + dim) for edge in (first, first + boxes[:, most + dim])
        )
        product = product * ((low + _PRIME - high) % _PRIME) % _PRIME
    return product


def _number(coordinate: np.ndarray, stream: int) -> np.ndarray:
    """What splitmix64 makes of it: as good as drawn, and the same on every rank."""
    mixed = coordinate.astype(np.uint64) + np.uint64((stream + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) % _PRIME
