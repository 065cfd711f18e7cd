"""The pieces of streams: bombs and malformed planes are refused before memory is taken."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard

from torch_ckpt.codecs.codec import CodecError
from torch_ckpt.codecs.streams import CONSTANT, PLANE, STORED, ZSTD, Cursor, join, pack_plane, split


def plane(kind: int, payload: bytes) -> Cursor:
    return Cursor(memoryview(PLANE.pack(kind, len(payload)) + payload))


@pytest.mark.parametrize("level", [1, 19])
def test_a_frame_that_declares_more_than_its_plane_is_refused_unread(level: int) -> None:
    bomb = zstandard.ZstdCompressor(level=level).compress(bytes(1 << 28))
    tracemalloc.start()
    with pytest.raises(CodecError, match="declares 268435456 bytes, its plane has 1000"):
        plane(ZSTD, bomb).plane(1000)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_frame_that_holds_more_or_less_than_it_declares_is_refused() -> None:
    honest = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26))
    assert honest[4] & 0xE0 == 0x80  # a window byte, then a content size of four bytes
    for size in (1000, 1 << 25, 1 << 27):
        liar = honest[:6] + struct.pack("<I", size) + honest[10:]
        assert zstandard.frame_content_size(liar) == size
        tracemalloc.start()
        with pytest.raises(CodecError, match=r"cannot be decompressed|its plane has"):
            plane(ZSTD, liar).plane(size)
        assert tracemalloc.get_traced_memory()[1] < 2 * size + (1 << 20)
        tracemalloc.stop()


def test_a_frame_without_its_size_is_refused() -> None:
    bare = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(1 << 20))
    with pytest.raises(CodecError, match="declares"):
        plane(ZSTD, bare).plane(1 << 20)


def test_two_frames_in_one_plane_are_refused() -> None:
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(500))
    for second in (frame, b"x", zstandard.ZstdCompressor().compress(b"")):
        with pytest.raises(CodecError, match="cannot be decompressed"):
            plane(ZSTD, frame + second).plane(500)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [(STORED, bytes(9)), (STORED, bytes(11)), (CONSTANT, b""), (CONSTANT, b"ab"), (3, bytes(10))],
)
def test_a_plane_of_another_kind_or_size_is_refused(kind: int, payload: bytes) -> None:
    with pytest.raises(CodecError, match="a plane of 10 bytes is stored in"):
        plane(kind, payload).plane(10)


def test_an_empty_plane_is_stored_empty() -> None:
    stored = b"".join(pack_plane(np.empty(0, np.uint8)))
    assert stored == PLANE.pack(STORED, 0)
    assert len(Cursor(memoryview(stored)).plane(0)) == 0
    with pytest.raises(CodecError):
        plane(CONSTANT, b"a").plane(0)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 32767, 32768, 32769])
def test_planes_are_the_bytes_of_words_from_the_lowest(size: int, count: int) -> None:
    raw = random.Random(0).randbytes(size * count)
    words = np.frombuffer(raw, f"<u{size}")
    planes = split(words)
    assert [bytes(p) for p in planes] == [raw[i::size] for i in range(size)]
    back = np.empty(count, words.dtype)
    join(list(planes), back)
    assert back.tobytes() == raw
