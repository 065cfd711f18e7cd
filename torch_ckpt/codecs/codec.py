"""What a codec is: a pure transform of one block's bytes, and the error of bytes that are none.

Knows element types by torch's names. Knows nothing of tensors, blocks' places or the manifest.
"""

from __future__ import annotations

import abc
from typing import ClassVar

SAMPLES = 8
SAMPLE_BYTES = 24 << 10
"""A few tensors may share a block, so many short slices tell more than few long ones."""

ALIGNED_BYTES = 512
"""Slices begin at multiples of this, so that words and groups of 128 floats stay whole."""

WORD_BYTES = {
    "complex128": 8,
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "complex64": 4,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "complex32": 2,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Bytes of one number of each element type; a complex element is two numbers."""


class CodecError(ValueError):
    """Stored bytes that are no stream of this codec, or not one for this length and base.

    Names neither file nor tensor: whoever reads a block knows those and adds them.
    """


class Codec(abc.ABC):
    """A transform of one block. Instances hold no state and may be used by many threads at once.

    Encoding the same bytes gives the same stream, whatever was encoded before. A stream describes
    itself: its reader knows the block's length and base, and nothing of its element type.
    """

    name: ClassVar[str]
    """What the part says of a block in this coding."""

    lossless: ClassVar[bool]
    """Whether decoding gives the very bytes back."""

    needs_base: ClassVar[bool]
    """Whether both ways need the block at the same place of an earlier generation."""

    @abc.abstractmethod
    def encode(
        self, raw: memoryview, *, dtype: str, base: memoryview | None = None
    ) -> bytes | None:
        """The stream of `raw`; None where it would gain nothing, so that raw bytes are stored.

        Args:
            raw: The block, any length and alignment, under 4 GiB.
            dtype: Its element type, as torch names it.
            base: As long as `raw`; for codecs that need one.

        Raises:
            ValueError: an element type of another name; a base that is missing, surplus or of
                another length.
        """

    @abc.abstractmethod
    def decode(
        self, stored: memoryview, *, raw_bytes: int, base: memoryview | None = None
    ) -> memoryview:
        """The block in fresh, writable memory of exactly `raw_bytes`.

        Memory stays in proportion to `raw_bytes` whatever the stream claims.

        Raises:
            CodecError: `stored` is no stream of this codec, is cut short or goes on after its
                end, is of a later version, or is not one for this length and base.
        """

    def estimate(self, raw: memoryview, *, dtype: str, base: memoryview | None = None) -> float:
        """About how many times smaller than `raw` its stream is, from a few slices; at least 1."""
        sample = _slices(raw)
        if not sample:
            return 1.0
        stream = self.encode(
            memoryview(sample),
            dtype=dtype,
            base=None if base is None else memoryview(_slices(base)),
        )
        return 1.0 if stream is None else len(sample) / len(stream)

    def refuse_base(self, base: memoryview | None) -> None:
        """For codecs without a base: one that is given is a mix-up of blocks."""
        if base is not None:
            raise ValueError(f"codec {self.name!r} takes no base")

    def require_base(self, base: memoryview | None, raw_bytes: int) -> memoryview:
        """The base, which must be there and as long as the block."""
        if base is None:
            raise ValueError(f"codec {self.name!r} needs the block of an earlier generation")
        if base.nbytes != raw_bytes:
            raise CodecError(f"the base has {base.nbytes} bytes, the block {raw_bytes}")
        return base


def _slices(block: memoryview) -> bytes:
    """Equally spaced slices of a block, or all of a small one."""
    block = block.cast("B")
    if len(block) <= SAMPLES * SAMPLE_BYTES:
        return bytes(block)
    part = len(block) / SAMPLES
    starts = [int(part * i + (part - SAMPLE_BYTES) / 2) for i in range(SAMPLES)]
    starts = [start // ALIGNED_BYTES * ALIGNED_BYTES for start in starts]
    return b"".join(block[start : start + SAMPLE_BYTES] for start in starts)


def word_bytes(dtype: str) -> int:
    """Bytes of one number of the element type that torch calls `dtype`."""
    try:
        return WORD_BYTES[dtype]
    except KeyError:
        raise ValueError(
            f"codecs know no element type {dtype!r}; store it raw, or as one of "
            f"{', '.join(WORD_BYTES)}"
        ) from None
