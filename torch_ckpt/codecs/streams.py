"""The pieces that streams are made of: a header, byte planes, raw bytes; written and read back.

`docs/codecs.md` is the description of every byte. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from torch_ckpt.codecs.codec import CodecError

Bytes: TypeAlias = NDArray[np.uint8]
Words: TypeAlias = NDArray[np.unsignedinteger]

VERSION = 1
LARGEST_BYTES = 2**32 - 1
HEADER = struct.Struct("<4sBBHI")
"""Mark of the codec, version, kind of words, 0, bytes of the block."""
PLANE = struct.Struct("<BI")
"""How a plane is stored, stored bytes."""
STORED, CONSTANT, ZSTD = range(3)

CHUNK_WORDS = 1 << 15
"""Words handled at once, so that what lies between two steps stays in the processor's cache."""

_PROBES, _PROBE_BYTES = 3, 8 << 10
_WORTH = 0.99
"""A compressed plane must be smaller than this part of it, or it costs time for nothing."""


class _Contexts(threading.local):
    """One thread's own, built at its first use: a context of zstd serves one caller at a time."""

    def __init__(self) -> None:
        self.matching = zstandard.ZstdCompressor(level=1)
        self.entropy = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST,
                window_log=15,  # tables of their own for every 32 KiB
                hash_log=6,
                chain_log=6,
                search_log=1,
                min_match=7,
                target_length=0,
            )
        )
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def header(mark: bytes, kind: int, raw_bytes: int) -> bytes:
    """How a stream begins."""
    if raw_bytes > LARGEST_BYTES:
        raise ValueError(f"a block of {raw_bytes} bytes is over {LARGEST_BYTES}; cut it smaller")
    return HEADER.pack(mark, VERSION, kind, 0, raw_bytes)


def assemble(
    mark: bytes, kind: int, planes: Bytes, rest: memoryview, raw_bytes: int
) -> bytes | None:
    """A stream of planes and of what is no whole word; None where it is not smaller."""
    pieces: list[bytes | memoryview] = [header(mark, kind, raw_bytes)]
    for plane in planes:
        pieces += pack_plane(plane)
    pieces.append(rest)
    return join_if_smaller(pieces, raw_bytes)


def join_if_smaller(pieces: Sequence[bytes | memoryview], raw_bytes: int) -> bytes | None:
    """The stream, if it is smaller than the block by what makes decoding it worth while."""
    if sum(len(piece) for piece in pieces) >= _WORTH * raw_bytes:
        return None
    return b"".join(pieces)


class Cursor:
    """Reads a stream from its start, piece by piece, and never past its end."""

    def __init__(self, stored: memoryview) -> None:
        self._stored, self._at = stored.cast("B"), 0

    def take(self, size: int) -> memoryview:
        """The next `size` bytes.

        Raises:
            CodecError: there are fewer.
        """
        piece = self._stored[self._at : self._at + size]
        if len(piece) != size:
            raise CodecError(
                f"the stream ends at byte {len(self._stored)}, {size - len(piece)} bytes short"
            )
        self._at += size
        return piece

    def header(self, mark: bytes, kinds: Iterable[int], raw_bytes: int) -> int:
        """The kind of words, once the header has been found to be of `mark` and of that length."""
        found, version, kind, zero, claimed = HEADER.unpack(self.take(HEADER.size))
        if found != mark:
            raise CodecError(f"the stream begins with {found!r}, not with {mark!r}")
        if version != VERSION or zero:
            raise CodecError(
                f"the stream is of version {version}.{zero}, this release reads {VERSION}.0"
            )
        if kind not in kinds:
            raise CodecError(f"the stream claims words of the unknown kind {kind}")
        if claimed != raw_bytes:
            raise CodecError(f"the stream is of {claimed} bytes, the block of {raw_bytes}")
        return kind

    def plane(self, size: int) -> Bytes:
        """The next plane, of `size` bytes. Read-only."""
        kind, stored = PLANE.unpack(self.take(PLANE.size))
        piece = self.take(stored)
        if kind == STORED and stored == size:
            return np.frombuffer(piece, np.uint8)
        if kind == CONSTANT and stored == 1 and size:
            return np.broadcast_to(np.frombuffer(piece, np.uint8), size)
        if kind == ZSTD:
            return np.frombuffer(_decompress(piece, size), np.uint8)
        raise CodecError(f"a plane of {size} bytes is stored in {stored} bytes as kind {kind}")

    def words(self, count: int, size: int) -> Words:
        """The next `size` planes as words of that many bytes, in memory of their own."""
        planes = [self.plane(count) for _ in range(size)]
        return joined(planes, np.dtype(f"<u{size}"))

    def finish(self) -> None:
        """Refuse what follows the end of the stream."""
        if left := len(self._stored) - self._at:
            raise CodecError(f"{left} bytes follow the end of the stream")


def _decompress(frame: memoryview, size: int) -> bytes:
    """The content of one zstd frame, which must declare `size` bytes and hold nothing else."""
    try:
        declared = zstandard.frame_content_size(frame)
        if declared != size:  # before anything is allocated
            raise CodecError(f"a frame declares {declared} bytes, its plane has {size}")
        content = _contexts.decompressor.decompress(frame, size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"a plane cannot be decompressed: {error}") from error
    if len(content) != size:
        raise CodecError(f"a frame holds {len(content)} bytes, its plane has {size}")
    return content


def pack_plane(plane: Bytes) -> list[bytes | memoryview]:
    """A contiguous plane as it is stored: one byte if constant, compressed if that pays, or raw."""
    size = len(plane)
    if size and plane[0] == plane[-1] and bool((plane == plane[0]).all()):
        return [PLANE.pack(CONSTANT, 1), plane[:1].tobytes()]
    frame = _compressor_for(plane).compress(plane.data) if size else b""
    if not size or len(frame) >= _WORTH * size:
        return [PLANE.pack(STORED, size), plane.data]
    return [PLANE.pack(ZSTD, len(frame)), frame]


def _compressor_for(plane: Bytes) -> zstandard.ZstdCompressor:
    """Of two settings the one that makes a few slices smaller; both give ordinary frames.

    Exponents of floats hold no repeats worth finding: with a tiny hash table and long matches only
    zstd is an entropy coder, up to three times as fast as level 1. Text, indices and
    sparse rows do hold repeats.
    """
    matching, entropy = _contexts.matching, _contexts.entropy
    if len(plane) <= _PROBES * _PROBE_BYTES:
        slices = [plane]
    else:
        gap = (len(plane) - _PROBE_BYTES) // (_PROBES - 1)
        slices = [plane[i * gap : i * gap + _PROBE_BYTES] for i in range(_PROBES)]
    sizes = [sum(len(c.compress(part.data)) for part in slices) for c in (matching, entropy)]
    flat = sizes[1] >= _WORTH * sum(map(len, slices))  # then only distant repeats could pay
    return matching if flat or sizes[0] < sizes[1] else entropy


def split(words: Words) -> Bytes:
    """Byte planes of words, least significant first: shape (bytes a word, words)."""
    planes = np.empty((words.itemsize, len(words)), np.uint8)
    for start in range(0, len(words), CHUNK_WORDS):
        split_into(words[start : start + CHUNK_WORDS], planes[:, start : start + CHUNK_WORDS])
    return planes


def split_into(words: Words, planes: Bytes) -> None:
    """`split` into given planes; for chunks that fit a cache."""
    planes[0] = words  # keeps the low byte
    for index in range(1, words.itemsize):
        np.copyto(planes[index], words >> words.dtype.type(8 * index), casting="unsafe")


def join(planes: Sequence[Bytes], words: Words) -> None:
    """Put words together from their byte planes, into `words`."""
    columns = words.view(np.uint8).reshape(len(words), words.itemsize)
    for index, plane in enumerate(planes):
        columns[:, index] = plane


def joined(planes: Sequence[Bytes], dtype: np.dtype) -> Words:
    """Words of their own, put together from byte planes."""
    words = np.empty(len(planes[0]), dtype)
    join(planes, words)
    return words


def word_array(block: memoryview, word: int) -> tuple[Words, memoryview]:
    """A block as little-endian words, without a copy, and the bytes that are no whole word."""
    block = block.cast("B")
    whole = len(block) // word * word
    return np.frombuffer(block[:whole], np.dtype(f"<u{word}")), block[whole:]
