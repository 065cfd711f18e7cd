"""`zstd`: the bytes of each word apart from one another, each plane compressed where that pays.

The exponents of neighbouring numbers are alike and their mantissas are noise, so planes compress
better and faster than interleaved bytes do. Floats are turned by one bit first, which brings the
whole exponent of float32 and bfloat16 into one plane. Knows nothing of a base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from torch_ckpt.codecs import streams
from torch_ckpt.codecs.codec import Codec, word_bytes
from torch_ckpt.codecs.streams import Words

MARK = b"PLAN"
TURNED = 16
"""Added to the bytes a word where words are turned: the sign is then the lowest bit."""

KINDS = (1, 2, 4, 8, TURNED + 2, TURNED + 4, TURNED + 8)


@dataclass(frozen=True, slots=True)
class Planes(Codec):
    """Byte planes and zstd; lossless."""

    name: ClassVar[str] = "zstd"
    lossless: ClassVar[bool] = True
    needs_base: ClassVar[bool] = False

    def encode(
        self, raw: memoryview, *, dtype: str, base: memoryview | None = None
    ) -> bytes | None:
        self.refuse_base(base)
        words, rest = streams.word_array(raw, word_bytes(dtype))
        turned = words.itemsize > 1 and dtype.startswith(("float", "bfloat", "complex"))
        planes = np.empty((words.itemsize, len(words)), np.uint8)
        for start in range(0, len(words), streams.CHUNK_WORDS):
            here = slice(start, start + streams.CHUNK_WORDS)
            chunk = words[here]
            if turned:
                chunk = _turn(chunk, 1)
            streams.split_into(chunk, planes[:, here])
        kind = words.itemsize + (TURNED if turned else 0)
        return streams.assemble(MARK, kind, planes, rest, raw.nbytes)

    def decode(
        self, stored: memoryview, *, raw_bytes: int, base: memoryview | None = None
    ) -> memoryview:
        self.refuse_base(base)
        cursor = streams.Cursor(stored)
        kind = cursor.header(MARK, KINDS, raw_bytes)
        word = kind % TURNED
        count, rest = divmod(raw_bytes, word)
        planes = [cursor.plane(count) for _ in range(word)]
        block = memoryview(bytearray(raw_bytes))
        words = np.frombuffer(block, np.dtype(f"<u{word}"), count)
        for start in range(0, count, streams.CHUNK_WORDS):
            here = slice(start, start + streams.CHUNK_WORDS)
            streams.join([plane[here] for plane in planes], words[here])
            if kind > TURNED:
                words[here] = _turn(words[here], 8 * word - 1)
        block[raw_bytes - rest :] = cursor.take(rest)
        cursor.finish()
        return block


def _turn(words: Words, bits: int) -> Words:
    """Each word turned to the left by so many bits."""
    left, right = words.dtype.type(bits), words.dtype.type(8 * words.itemsize - bits)
    return (words << left) | (words >> right)
