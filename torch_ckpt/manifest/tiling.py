"""Whether boxes tile a larger one: every element in exactly one of them, neither twice nor never.

Counting elements is not enough, since what lies twice can make up for what is missing. Knows
boxes of whole numbers. Knows nothing of documents.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from secrets import randbits

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and shape."""

_PRIME = (1 << 61) - 1


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether boxes inside of `shape`, some of them perhaps empty, hold each element once.

    If they do, their signed corners cancel out but for those of the whole, and only then. A box in
    n dimensions has 2 ** n corners, which are never listed: with a number drawn for each
    coordinate, the sum over them is a product of n differences. So it takes about as long as to
    go through the boxes. Boxes that tile always pass; others do with a chance below 1 in 2 ** 54,
    however they were chosen, since the numbers are drawn afterwards.
    """
    draw = partial(random.Random(randbits(128)).randrange, _PRIME)
    drawn = [defaultdict[int, int](draw) for _ in shape]
    whole = _corners(drawn, (0,) * len(shape), shape)
    return (sum(_corners(drawn, *box) for box in boxes) - whole) % _PRIME == 0


def _corners(drawn: Sequence[Mapping[int, int]], start: Sequence[int], size: Sequence[int]) -> int:
    product = 1
    for numbers, first, length in zip(drawn, start, size, strict=True):
        product = product * (numbers[first] - numbers[first + length]) % _PRIME
    return product
