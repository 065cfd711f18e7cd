"""One block, one chunk, one tensor of a part, as frozen values.

Knows element types. Knows nothing of the documents that list them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_ckpt.manifest.dtypes import DTYPES

BLOCK_BYTES = 8 << 20
"""No block holds more raw bytes than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A run of stored bytes that is hashed, encoded and read as one."""

    file: int
    """Index into the part's files, and behind these into its borrowed ones."""
    offset: int
    """First byte in that file."""
    bytes: int
    """Stored bytes."""
    raw_bytes: int
    """Bytes after decoding."""
    sha256: str
    """Of the stored bytes."""
    xxh3: str
    """Of the decoded bytes."""
    codec: str = "raw"
    base: int | None = None
    """Index into the part's bases, where the codec needs one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A rectangular piece of a tensor that one rank wrote, row-major, in its raw space."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    """First byte in the part's raw space: all its blocks, decoded, back to back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor and the chunks of it that this part holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Global shape."""
    chunks: tuple[Chunk, ...]

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return DTYPES[self.dtype].itemsize

    def chunk_bytes(self, chunk: Chunk) -> int:
        """Raw bytes of one of its chunks."""
        return math.prod(chunk.shape) * self.itemsize
