"""The pieces of streams: bombs and malformed planes are refused before memory is taken."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard

from torch_ckpt.codecs.codec import CodecError
from torch_ckpt.codecs.names import NAMES, codec_named
from torch_ckpt.codecs.streams import (
    CONSTANT,
    HEADER,
    PLANE,
    STORED,
    ZSTD,
    Cursor,
    join,
    pack_plane,
    split,
)


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


@pytest.mark.parametrize("name", NAMES)
def test_streams_made_up_for_short_blocks_are_refused_or_decoded(name: str) -> None:
    """Headers that fit, and few bytes after them: what a fuzzer would find at the edges."""
    codec, rng, decoded = codec_named(name), random.Random(7), 0
    mark = {
        "zstd": b"PLAN",
        "delta": b"DELT",
        "fp8": b"FP8 ",
        "fp8-sqrt": b"FP8R",
        "lossy-delta": b"RESI",
    }[name]
    for _ in range(1500):
        size = rng.choice([0, 1, 2, 3, 4, 5, 8, 127, 256, 258, 512, 516])
        kind = rng.choice([1, 2, 3, 4, 8, 18, 20, 24])
        word = {1: 4, 3: 2, 18: 2, 20: 4, 24: 8}.get(kind, kind)
        count, groups = size // word, -(-(size // word) // 128)
        lengths = rng.choice(
            [
                [count] * word,
                [groups, *rng.choice([[count] + [0] * word, [0] + [count] * word])],
                [groups] * 2 + rng.choice([[count] * 2 + [0] * word, [0] * 2 + [count] * word]),
            ]
        )
        if rng.random() < 0.2:
            lengths[rng.randrange(len(lengths))] = rng.choice([0, 1, 2, size])
        stream = HEADER.pack(mark, 1, kind, 0, size)
        for length in lengths:
            stream += PLANE.pack(STORED, length) + rng.choice([b"\xff", b"\0", b"\x55"]) * length
        stream += bytes(rng.choice([size % word, size % word, 1]))
        base = memoryview(rng.randbytes(size)) if codec.needs_base else None
        try:
            back = codec.decode(memoryview(stream), raw_bytes=size, base=base)
        except CodecError:
            continue
        assert len(back) == size
        decoded += 1
    assert decoded > 20
