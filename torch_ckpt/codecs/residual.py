"""`lossy-delta`: what changed since the base, rounded to a part of the change itself.

Each group of 128 is rounded to multiples of a step of its own, so that no element is off by more
than `error` times the root mean square of its group's change. Groups for which that cannot be had
are exact. Knows nothing of generations: that errors never add up follows from a base that is what
a reader would get, and is the caller's to see to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_ckpt.codecs import floats, streams
from torch_ckpt.codecs.codec import Codec, CodecError, word_bytes
from torch_ckpt.codecs.delta import zag_zig, zig_zag
from torch_ckpt.codecs.floats import GROUP, Floats
from torch_ckpt.codecs.streams import Words

MARK = b"RESI"
EXACT = 0xFFFF
"""A step that says: this group is stored as its exact difference. Others are the upper half of a
float32; times a code of 16 bits that is exact in float32, on every device."""

INFINITE = 0x7F80
LEAST_STEP = 2.0**-100
_UNSURE = 1 - 2.0**-20
"""Differences of float32 are themselves rounded: a bound that is kept by this much is kept."""

LEAST_ERROR, MOST_ERROR = 2.0**-10, 0.5


@dataclass(frozen=True, slots=True)
class LossyDelta(Codec):
    """A quantised difference to the base, zig-zag, byte planes and zstd."""

    name: ClassVar[str] = "lossy-delta"
    lossless: ClassVar[bool] = False
    needs_base: ClassVar[bool] = True

    error: float = 2.0**-4
    """Largest error of an element, as a part of the root mean square of the change of its group
    of 128. The errors' own root mean square is about this divided by the root of 3."""

    def __post_init__(self) -> None:
        if not LEAST_ERROR <= self.error <= MOST_ERROR:
            raise ValueError(
                f"the error of a lossy delta must be {LEAST_ERROR} … {MOST_ERROR} of the change, "
                f"got {self.error}"
            )

    def encode(
        self, raw: memoryview, *, dtype: str, base: memoryview | None = None
    ) -> bytes | None:
        base = self.require_base(base, raw.nbytes)
        words, rest = streams.word_array(raw, word_bytes(dtype))
        kind = floats.KINDS.get(dtype)
        if kind is None:
            return None
        before, _ = streams.word_array(base, words.itemsize)
        steps = np.empty(floats.groups_of(len(words)), "<u2")
        codes = np.empty(len(words), "<u2")
        with np.errstate(all="ignore"):  # what overflows is stored exactly
            for start in range(0, len(words), streams.CHUNK_WORDS):
                here = slice(start, start + streams.CHUNK_WORDS)
                quantised = self._quantise(words[here], before[here], kind)
                steps[start // GROUP :][: len(quantised.steps)] = quantised.steps
                codes[here] = quantised.codes
        exact = words[:0]
        if (escaped := steps == EXACT).any():
            exact = zig_zag(floats.pick(words, escaped) - floats.pick(before, escaped))
            codes = floats.pick(codes, ~escaped)
        pieces = [streams.header(MARK, kind, raw.nbytes)]
        for plane in (*streams.split(steps), *streams.split(codes), *streams.split(exact)):
            pieces += streams.pack_plane(plane)
        return streams.join_if_smaller([*pieces, rest], raw.nbytes)

    def decode(
        self, stored: memoryview, *, raw_bytes: int, base: memoryview | None = None
    ) -> memoryview:
        base = self.require_base(base, raw_bytes)
        cursor = streams.Cursor(stored)
        kind = cursor.header(MARK, floats.ITEMSIZE, raw_bytes)
        before, rest = streams.word_array(base, floats.ITEMSIZE[kind])
        count = len(before)
        steps = cursor.words(floats.groups_of(count), 2)
        escaped = steps == EXACT
        if not ((steps < INFINITE) | escaped).all():
            raise CodecError("a step is out of range")
        exact_count = floats.picked(escaped, count)
        codes = cursor.words(count - exact_count, 2)
        exact = cursor.words(exact_count, before.itemsize)
        if exact_count:
            everywhere = np.zeros(count, codes.dtype)
            floats.put(everywhere, ~escaped, codes)
            codes, steps = everywhere, np.where(escaped, 0, steps).astype(steps.dtype)
        block = memoryview(bytearray(raw_bytes))
        words = np.frombuffer(block, before.dtype, count)
        with np.errstate(all="ignore"):  # a damaged stream may overflow
            for start in range(0, count, streams.CHUNK_WORDS):
                here = slice(start, start + streams.CHUNK_WORDS)
                wide = floats.widen(before[here], kind)
                words[here] = _reconstruct(wide, steps[start // GROUP :], codes[here], kind)
        floats.put(words, escaped, zag_zig(exact) + floats.pick(before, escaped))
        block[raw_bytes - len(rest) :] = cursor.take(len(rest))
        cursor.finish()
        return block

    def bound(
        self, raw: memoryview, *, dtype: str, base: memoryview | None = None
    ) -> NDArray[np.float64]:
        """How far from it each element may come back; 0 for what comes back exactly."""
        base = self.require_base(base, raw.nbytes)
        kind = floats.KINDS[dtype]
        pair = [streams.word_array(block, floats.ITEMSIZE[kind])[0] for block in (raw, base)]
        with np.errstate(all="ignore"):
            now, then = (floats.widen(words, kind).astype(np.float64) for words in pair)
            change = floats.grouped(then - now)
            limits = self.error * _root_mean_squares(change, len(now))
        return floats.spread(np.where(np.isfinite(limits), limits, 0.0), len(now))

    def _quantise(self, words: Words, before: Words, kind: int) -> _Quantised:
        """Steps and codes of a chunk; a group that would break the bound gets the step `EXACT`."""
        now, then = (floats.grouped(floats.widen(part, kind)) for part in (words, before))
        change = then - now
        limits = self.error * _root_mean_squares(change, len(words)) * _UNSURE
        moved = floats.largest(change)
        most = floats.largest(then) + moved
        gaps = _gaps(most, kind)
        wanted = 2 * limits - gaps * (1 + 2.0**-10) - moved * 2.0**-21  # room for rounding
        usable = (wanted >= gaps) & (wanted >= LEAST_STEP)
        usable &= most < 2.0 ** floats.LARGEST_POWER[kind]  # false for NaN, as all of these are
        steps = (wanted.astype("<f4").view("<u4") >> 16).astype("<u2")  # towards zero
        steps[~usable] = 0
        sizes = _values(steps)[:, None]
        counts = np.rint(change * np.where(usable, 1 / _values(steps), 0)[:, None])
        codes = zig_zag(counts.astype("<i2").view("<u2"))
        back = then - counts * sizes
        if kind != 1:
            back = floats.widen(floats.narrow(back, kind), kind)
        kept = usable & (floats.largest(back - now) <= limits)
        # Where nothing is below zero, as in second moments, nothing may become zero or less.
        sunk = ((back <= 0) & (now > 0)).any(axis=1) & (now >= 0).all(axis=1)
        kept &= ~sunk
        steps[~kept] = EXACT
        if not kept.all():
            still = floats.grouped(words == before)  # not so where a zero changed its sign
            still.reshape(-1)[len(words) :] = True
            steps[still.all(axis=1) & np.isfinite(most)] = 0
        return _Quantised(steps, codes.reshape(-1)[: len(words)])


class _Quantised(NamedTuple):
    steps: Words
    codes: Words


def _root_mean_squares(change: NDArray, count: int) -> NDArray[np.float64]:
    """Of each group of `count` elements in all; the last group may be short."""
    counts = np.full(len(change), GROUP)
    if count % GROUP:
        counts[-1] = count % GROUP
    wide = change.astype(np.float64)  # squares of float32 may be too small or large for it
    return np.sqrt(np.einsum("ij,ij->i", wide, wide) / counts)


def _gaps(largest: Floats, kind: int) -> NDArray[np.float64]:
    """The distance between neighbouring numbers of that kind at these magnitudes."""
    _, exponents = np.frexp(largest)
    gaps = np.ldexp(1.0, exponents - 1 - floats.MANTISSA_BITS[kind])
    return np.maximum(gaps, floats.SMALLEST[kind])


def _values(steps: Words) -> Floats:
    return (steps.astype("<u4") << 16).view("<f4")


def _reconstruct(then: Floats, steps: Words, codes: Words, kind: int) -> Words:
    """`base - step * code`, rounded once in float32 and once to the kind, as bits.

    Subtraction, because a code of 0 then leaves -0.0 as it is.
    """
    counts = floats.grouped(zag_zig(codes).view("<i2").astype("<f4"))
    counts *= _values(steps[: len(counts)])[:, None]
    return floats.narrow(then - counts.reshape(-1)[: len(then)], kind)
