"""`delta`: what changed since the base, word by word, as small integers in byte planes.

The bits of a float that moved a little are, read as an integer, an integer that moved a little.
Subtraction finds more zero bits than xor does. Knows the base's bytes, not where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from torch_ckpt.codecs import streams
from torch_ckpt.codecs.codec import Codec, word_bytes
from torch_ckpt.codecs.streams import Words

MARK = b"DELT"
WORDS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Delta(Codec):
    """Difference to the base, zig-zag, byte planes and zstd; lossless."""

    name: ClassVar[str] = "delta"
    lossless: ClassVar[bool] = True
    needs_base: ClassVar[bool] = True

    def encode(
        self, raw: memoryview, *, dtype: str, base: memoryview | None = None
    ) -> bytes | None:
        base = self.require_base(base, raw.nbytes)
        words, rest = streams.word_array(raw, word_bytes(dtype))
        before, _ = streams.word_array(base, words.itemsize)
        planes = np.empty((words.itemsize, len(words)), np.uint8)
        for start in range(0, len(words), streams.CHUNK_WORDS):
            here = slice(start, start + streams.CHUNK_WORDS)
            streams.split_into(zig_zag(words[here] - before[here]), planes[:, here])
        return streams.assemble(MARK, words.itemsize, planes, rest, raw.nbytes)

    def decode(
        self, stored: memoryview, *, raw_bytes: int, base: memoryview | None = None
    ) -> memoryview:
        base = self.require_base(base, raw_bytes)
        cursor = streams.Cursor(stored)
        word = cursor.header(MARK, WORDS, raw_bytes)
        before, rest = streams.word_array(base, word)
        planes = [cursor.plane(len(before)) for _ in range(word)]
        block = memoryview(bytearray(raw_bytes))
        words = np.frombuffer(block, before.dtype, len(before))
        for start in range(0, len(words), streams.CHUNK_WORDS):
            here = slice(start, start + streams.CHUNK_WORDS)
            streams.join([plane[here] for plane in planes], words[here])
            words[here] = zag_zig(words[here])
            words[here] += before[here]
        block[raw_bytes - len(rest) :] = cursor.take(len(rest))
        cursor.finish()
        return block


def zig_zag(difference: Words) -> Words:
    """Signed numbers as unsigned ones in order of size: 0, -1, 1, -2, …; in two's complement."""
    signed = difference.view(difference.dtype.str.replace("u", "i"))
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(difference.dtype)


def zag_zig(mapped: Words) -> Words:
    """The inverse of `zig_zag`."""
    one = mapped.dtype.type(1)
    return (mapped >> one) ^ (~(mapped & one) + one)
