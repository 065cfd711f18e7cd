"""Blocks of floats for the lossy codecs: as float32, back again, and in groups of 128.

Every float16 and bfloat16 is a float32, so widening is exact. Knows nothing of codes or streams.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from torch_ckpt.codecs.streams import Words

Floats: TypeAlias = NDArray[np.float32]

GROUP = 128
"""Elements that share a scale."""

KINDS = {"float32": 1, "bfloat16": 2, "float16": 3}
"""Element types that lossy codecs take, and how a stream names them."""

ITEMSIZE = {1: 4, 2: 2, 3: 2}
SMALLEST = {1: 2.0**-149, 2: 2.0**-133, 3: 2.0**-24}
"""The distance between neighbours at zero: the least positive number of each kind."""

LARGEST_POWER = {1: 127, 2: 127, 3: 15}
MANTISSA_BITS = {1: 23, 2: 7, 3: 10}


def widen(words: Words, kind: int) -> Floats:
    """The numbers whose bits these are."""
    if kind == 1:
        return words.view("<f4")
    if kind == 2:
        wide = words.astype("<u4")
        wide <<= 16
        return wide.view("<f4")
    return words.view("<f2").astype("<f4")


def narrow(numbers: Floats, kind: int) -> Words:
    """Bits of the nearest numbers of that kind, ties to even; for finite numbers in its range."""
    if kind == 1:
        return numbers.view("<u4")
    if kind == 2:
        bits = numbers.view("<u4")
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    return numbers.astype("<f2").view("<u2")


def grouped(numbers: NDArray) -> NDArray:
    """Shape (groups, 128); the last group is filled up with zeros, without a copy where whole."""
    if missing := -len(numbers) % GROUP:
        numbers = np.concatenate([numbers, np.zeros(missing, numbers.dtype)])
    return numbers.reshape(-1, GROUP)


def largest(groups: Floats) -> Floats:
    """The largest magnitude of each group; NaN where there is one.

    Bits without the sign are ordered as magnitudes are, and their maximum is found twice as fast.
    """
    return (groups.view("<u4") & np.uint32(0x7FFFFFFF)).max(axis=1).view("<f4")


def groups_of(count: int) -> int:
    """How many groups so many elements make; the last one may be short."""
    return -(-count // GROUP)


def spread(of_groups: NDArray, count: int) -> NDArray:
    """A value a group as a value an element."""
    return np.repeat(of_groups, GROUP)[:count]


def pick(elements: NDArray, chosen: NDArray[np.bool_]) -> NDArray:
    """The elements of the chosen groups, in order, by whole rows."""
    whole = len(elements) // GROUP
    rows = elements[: whole * GROUP].reshape(-1, GROUP)[chosen[:whole]].reshape(-1)
    if chosen[whole:].any():  # the short group at the end
        return np.concatenate([rows, elements[whole * GROUP :]])
    return rows


def put(elements: NDArray, chosen: NDArray[np.bool_], values: NDArray) -> None:
    """The inverse of `pick`: give the chosen groups these elements."""
    whole = len(elements) // GROUP
    count = GROUP * int(np.count_nonzero(chosen[:whole]))
    elements[: whole * GROUP].reshape(-1, GROUP)[chosen[:whole]] = values[:count].reshape(-1, GROUP)
    if chosen[whole:].any():
        elements[whole * GROUP :] = values[count:]


def picked(chosen: NDArray[np.bool_], count: int) -> int:
    """How many of `count` elements the chosen groups hold."""
    missing = -count % GROUP if chosen[-1:].any() else 0
    return GROUP * int(np.count_nonzero(chosen)) - missing
