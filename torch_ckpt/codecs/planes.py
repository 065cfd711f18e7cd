"""`zstd`: the bytes of each word apart from one another, each plane compressed where that pays.

The exponents of neighbouring numbers are alike and their mantissas are noise, so planes compress
better and faster than interleaved bytes do. Knows nothing of a base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from torch_ckpt.codecs import streams
from torch_ckpt.codecs.codec import Codec, word_bytes

MARK = b"PLAN"
WORDS = (1, 2, 4, 8)


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
        return streams.assemble(MARK, streams.split(words), rest, raw.nbytes)

    def decode(
        self, stored: memoryview, *, raw_bytes: int, base: memoryview | None = None
    ) -> memoryview:
        self.refuse_base(base)
        cursor = streams.Cursor(stored)
        word = cursor.header(MARK, WORDS, raw_bytes)
        count, rest = divmod(raw_bytes, word)
        planes = [cursor.plane(count) for _ in range(word)]
        block = memoryview(bytearray(raw_bytes))
        whole = np.frombuffer(block, np.dtype(f"<u{word}"), count)
        streams.join(planes, whole)
        block[raw_bytes - rest :] = cursor.take(rest)
        cursor.finish()
        return block
