"""`fp8` and `fp8-sqrt`: optimizer moments in 8-bit floats (e4m3), a power of two a group of 128.

Scaling by a power of two is exact, so every device and library gives the same codes, the bound is
that of the 8-bit format alone, and a scale costs one byte. Knows nothing of optimizers.

Source of the format: "FP8 Formats for Deep Learning" (Micikevicius et al., 2022), e4m3: bias 7,
largest 448, least normal 2^-6, least of all 2^-9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from torch_ckpt.codecs import floats, streams
from torch_ckpt.codecs.codec import Codec, CodecError, word_bytes
from torch_ckpt.codecs.floats import GROUP, Floats
from torch_ckpt.codecs.streams import Bytes, Words

ESCAPED = 255
"""A scale that says: this group is stored as it is. Others are exponent fields of float32."""

LEAST, MOST = 1, 246
_LEAST_MAXIMUM = 2.0**-118
"""Below it the scale would leave float32's normal numbers."""

_NORMAL_BITS = np.uint32((127 - 6) << 23)
_SUBNORMAL_SHIFT = np.float32(2.0**14)
"""Added to a number below 2^-6 it leaves multiples of 2^-9 in the lowest bits, rounded to even."""

_CODES = np.arange(128)
_MAGNITUDES = np.where(
    _CODES < 8, _CODES * 2.0**-9, (8 + _CODES % 8) * 2.0 ** (_CODES // 8 - 10.0)
).astype(np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
"""What each code means; 127 and 255 would be NaN and are never written."""


@dataclass(frozen=True, slots=True)
class Fp8(Codec):
    """Block-scaled e4m3 and zstd; for moments of either sign.

    Every finite element is off by at most `2^-4 |x| + 2^-17 m`, `m` being the largest magnitude of
    its group; what is far below `m` becomes zero. Groups that hold NaN, an infinity, a magnitude
    of 2^127 (float16: 2^15) or more, or nothing but less than 2^-118, are exact, as are zeros.
    """

    name: ClassVar[str] = "fp8"
    lossless: ClassVar[bool] = False
    needs_base: ClassVar[bool] = False
    mark: ClassVar[bytes] = b"FP8 "

    def encode(
        self, raw: memoryview, *, dtype: str, base: memoryview | None = None
    ) -> bytes | None:
        self.refuse_base(base)
        words, rest = streams.word_array(raw, word_bytes(dtype))
        kind = floats.KINDS.get(dtype)
        if kind is None:
            return None
        codes, scales = self.coded(words, kind)
        exact = words[:0]
        if (escaped := scales == ESCAPED).any():
            exact, codes = floats.pick(words, escaped), floats.pick(codes, ~escaped)
        pieces = [streams.header(self.mark, kind, raw.nbytes)]
        for plane in (scales, codes, *streams.split(exact)):
            pieces += streams.pack_plane(plane)
        return streams.join_if_smaller([*pieces, rest], raw.nbytes)

    def coded(self, words: Words, kind: int) -> tuple[Bytes, Bytes]:
        """A code for every number, which means nothing in escaped groups, and a scale a group."""
        scales = np.empty(floats.groups_of(len(words)), np.uint8)
        codes = np.empty(len(words), np.uint8)
        with np.errstate(all="ignore"):  # groups with NaN, inf or surplus range are stored as is
            for start in range(0, len(words), streams.CHUNK_WORDS):
                chunk = words[start : start + streams.CHUNK_WORDS]
                groups = floats.grouped(self._forward(floats.widen(chunk, kind)))
                here = slice(start // GROUP, start // GROUP + len(groups))
                scales[here] = _scales(groups, self.ceiling(kind))
                coded = self._round(groups, scales[here])
                codes[start : start + len(chunk)] = coded.reshape(-1)[: len(chunk)]
        return codes, scales

    def decode(
        self, stored: memoryview, *, raw_bytes: int, base: memoryview | None = None
    ) -> memoryview:
        self.refuse_base(base)
        cursor = streams.Cursor(stored)
        kind = cursor.header(self.mark, floats.ITEMSIZE, raw_bytes)
        itemsize = floats.ITEMSIZE[kind]
        count = raw_bytes // itemsize
        scales = cursor.plane(floats.groups_of(count))
        escaped = scales == ESCAPED
        if not (((scales >= LEAST) & (scales <= MOST)) | escaped).all():
            raise CodecError("a scale is out of range")
        exact_count = floats.picked(escaped, count)
        codes = cursor.plane(count - exact_count)
        exact = cursor.words(exact_count, itemsize)
        block = memoryview(bytearray(raw_bytes))
        words = np.frombuffer(block, f"<u{itemsize}", count)
        if exact_count:
            everywhere = np.zeros(count, np.uint8)
            floats.put(everywhere, ~escaped, codes)
            codes, scales = everywhere, np.where(escaped, LEAST, scales)
        self.values_into(words, codes, scales, kind)
        floats.put(words, escaped, exact)
        block[count * itemsize :] = cursor.take(raw_bytes - count * itemsize)
        cursor.finish()
        return block

    def bound(
        self, raw: memoryview, *, dtype: str, base: memoryview | None = None
    ) -> NDArray[np.float64]:
        """How far from it each element may come back; 0 for what comes back exactly."""
        self.refuse_base(base)
        kind = floats.KINDS[dtype]
        words, _ = streams.word_array(raw, floats.ITEMSIZE[kind])
        numbers = floats.widen(words, kind)
        with np.errstate(all="ignore"):
            scales = _scales(floats.grouped(self._forward(numbers)), self.ceiling(kind))
            magnitudes = np.abs(numbers.astype(np.float64))
            largest = floats.grouped(magnitudes).max(axis=1)
            allowed = self._allowed(magnitudes, floats.spread(largest, len(numbers)), kind)
        return np.where(floats.spread(scales == ESCAPED, len(numbers)), 0.0, allowed)

    def _allowed(
        self, magnitudes: NDArray[np.float64], largest: NDArray[np.float64], kind: int
    ) -> NDArray[np.float64]:
        return 2.0**-4 * magnitudes + 2.0**-17 * largest

    def ceiling(self, kind: int) -> float:
        """The group maximum from which rounding up could leave the element type's range."""
        return 2.0 ** floats.LARGEST_POWER[kind]

    def _forward(self, numbers: Floats) -> Floats:
        return numbers

    def _round(self, groups: Floats, scales: Bytes) -> Bytes:
        return _round(groups, scales, never_to_zero=False)

    def values_into(self, words: Words, codes: Bytes, scales: Bytes, kind: int) -> None:
        """Give words the values of codes whose scales are in range and none of them escaped."""
        for start in range(0, len(words), streams.CHUNK_WORDS):
            chunk = codes[start : start + streams.CHUNK_WORDS]
            groups = floats.grouped(_VALUES.take(chunk))
            here = slice(start // GROUP, start // GROUP + len(groups))
            groups *= _power(scales[here])[:, None]
            numbers = self._backward(groups.reshape(-1)[: len(chunk)], kind)
            words[start : start + len(chunk)] = floats.narrow(numbers, kind)

    def _backward(self, numbers: Floats, kind: int) -> Floats:
        return numbers


@dataclass(frozen=True, slots=True)
class Fp8Sqrt(Fp8):
    """The square root in block-scaled e4m3, and zstd; for second moments, which span more.

    Every element is off by at most `2^-3 x + 2^-30 m` and half the least number of its type, `m`
    being the largest of its group. What is not zero never becomes zero, since optimizers divide
    by it. Groups that hold NaN, anything below zero, or 2^126 (float16: 2^14) or more, are exact.
    """

    name: ClassVar[str] = "fp8-sqrt"
    mark: ClassVar[bytes] = b"FP8R"

    def _allowed(
        self, magnitudes: NDArray[np.float64], largest: NDArray[np.float64], kind: int
    ) -> NDArray[np.float64]:
        half = np.where(magnitudes > 0, floats.SMALLEST[kind] / 2, 0.0)
        return 2.0**-3 * magnitudes + np.where(magnitudes > 0, 2.0**-30 * largest, 0.0) + half

    def ceiling(self, kind: int) -> float:
        return 2.0 ** (floats.LARGEST_POWER[kind] // 2)

    def _forward(self, numbers: Floats) -> Floats:
        return np.sqrt(numbers)

    def _round(self, groups: Floats, scales: Bytes) -> Bytes:
        return _round(groups, scales, never_to_zero=True)

    def _backward(self, numbers: Floats, kind: int) -> Floats:
        with np.errstate(over="ignore", under="ignore"):  # only a damaged stream goes over
            squares = numbers * numbers
        np.copysign(squares, numbers, out=squares)  # the square root of -0.0 is -0.0
        lost = np.abs(squares) < floats.SMALLEST[kind]
        if lost.any():
            least = np.copysign(np.float32(floats.SMALLEST[kind]), numbers)
            squares = np.where(lost & (numbers != 0), least, squares)
        return squares


def _scales(groups: Floats, ceiling: float) -> Bytes:
    """The exponent field of the least power of two by which a group fits into ±448.

    A group of zeros takes the least scale there is.
    """
    largest = floats.largest(groups)
    mantissas, exponents = np.frexp(largest)
    fields = np.where(mantissas <= 0.875, exponents - 9, exponents - 8) + 127  # 448 = 0.875 * 2^9
    usable = (largest >= _LEAST_MAXIMUM) & (largest < ceiling)
    scales = np.where(usable, fields, ESCAPED)
    return np.where(largest == 0, LEAST, scales).astype(np.uint8)


def _power(scales: Bytes) -> Floats:
    """The scale of each group: 2^(field - 127)."""
    return (scales.astype("<u4") << 23).view("<f4")


def _round(groups: Floats, scales: Bytes, *, never_to_zero: bool) -> Bytes:
    """Codes of the nearest e4m3 numbers, ties to even; of escaped groups anything."""
    scaled = groups * _power((254 - np.minimum(scales, 253)).astype(np.uint8))[:, None]
    bits = scaled.view("<u4")
    signs = (bits >> 24) & 0x80
    bits &= 0x7FFFFFFF
    small = (bits.view("<f4") + _SUBNORMAL_SHIFT).view("<u4")
    small -= _SUBNORMAL_SHIFT.view("<u4")
    if never_to_zero:
        np.maximum(small, bits != 0, out=small)
    normal = np.maximum(bits, _NORMAL_BITS)
    normal += ((normal >> 20) & 1) + 0x7FFFF
    normal >>= 20
    normal -= (127 - 7) << 3
    np.minimum(small, normal, out=small)  # below 2^-6 `normal` is 8, above it is the lesser one
    small |= signs
    return small.astype(np.uint8)
