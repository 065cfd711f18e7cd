"""The lossless codecs pass the suite, and what is particular to each of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.suites.codec_suite import CodecSuite, neighbour, numbers
from torch_ckpt.codecs.codec import WORD_BYTES
from torch_ckpt.codecs.delta import Delta, zag_zig, zig_zag
from torch_ckpt.codecs.names import NAMES, codec_named
from torch_ckpt.codecs.planes import Planes
from torch_ckpt.codecs.streams import CONSTANT, HEADER, PLANE, ZSTD
from torch_ckpt.manifest.dtypes import DTYPES


class TestPlanes(CodecSuite):
    codec = Planes()

    def test_a_constant_block_is_a_few_bytes(self) -> None:
        raw = np.full(1 << 18, 1.5, np.float32).tobytes()
        stream = self.check(raw, "float32", raw)
        assert stream is not None
        assert len(stream) < 50

    def test_planes_of_noise_are_stored_as_they_are(self) -> None:
        raw = numbers("float32", 10_000)
        stream = self.check(raw, "float32", raw)
        assert stream is not None
        assert raw[1::4] not in stream  # whose bits are turned
        words = np.frombuffer(raw, np.uint32)
        turned = ((words << 1) | (words >> 31)).tobytes()
        assert turned[0::4] in stream  # the low end of each mantissa, and the sign
        assert turned[3::4] not in stream

    def test_the_whole_exponent_is_in_one_plane(self) -> None:
        powers = np.float32(2.0) ** np.arange(-8, 8, dtype=np.float32)
        raw = np.resize(powers, 10_000).tobytes()
        stream = self.check(raw, "float32", raw)
        assert stream is not None
        assert self.kinds_of_planes(stream, 4) == [CONSTANT, CONSTANT, CONSTANT, ZSTD]
        as_integers = self.check(raw, "int32", raw)
        assert as_integers is not None
        assert self.kinds_of_planes(as_integers, 4) == [CONSTANT, CONSTANT, ZSTD, ZSTD]

    def kinds_of_planes(self, stream: bytes, count: int) -> list[int]:
        kinds, at = [], HEADER.size
        for _ in range(count):
            kind, size = PLANE.unpack_from(stream, at)
            kinds.append(kind)
            at += PLANE.size + size
        assert at == len(stream)
        return kinds

    def test_repeats_far_apart_are_found(self) -> None:
        row = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8).tobytes()
        stream = self.check(row * 3, "uint8", row * 3)
        assert stream is not None
        assert len(stream) < 0.4 * len(row * 3)


class TestDelta(CodecSuite):
    codec = Delta()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_did_not_change_is_a_few_bytes(self, dtype: str) -> None:
        raw = numbers(dtype, 1 << 14)
        stream = self.check(raw, dtype, raw)
        assert stream is not None
        assert len(stream) < 80

    def test_neighbours_are_smaller_than_on_their_own(self) -> None:
        raw = numbers("bfloat16", 1 << 16)
        stream = self.check(raw, "bfloat16", neighbour(raw, "bfloat16"))
        alone = Planes().encode(memoryview(raw), dtype="bfloat16")
        assert stream is not None
        assert alone is not None
        assert len(stream) < 0.5 * len(alone)

    def test_another_base_of_the_same_length_gives_other_bytes(self) -> None:
        raw, _, base, stream = self.sample()
        back = self.decode(stream, len(raw), bytes(len(base)))
        assert bytes(back) != raw  # which the digest of the raw block finds


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_zig_zag_orders_by_size_and_turns_back(size: int) -> None:
    kind = np.dtype(f"<u{size}")
    few = np.array([0, -1, 1, -2, 2, -3], f"<i{size}").view(kind)
    assert zig_zag(few).tolist() == [0, 1, 2, 3, 4, 5]
    wide = np.random.default_rng(0).integers(0, 256, 8 * 1000, np.uint8).view(kind)
    edges = np.array([2 ** (8 * size - 1), 2 ** (8 * size) - 1, 2 ** (8 * size - 1) - 1], kind)
    for words in (wide, edges):
        assert np.array_equal(zag_zig(zig_zag(words)), words)


def test_every_element_type_of_the_format_has_a_word_that_divides_it() -> None:
    assert WORD_BYTES.keys() == DTYPES.keys()
    for dtype, word in WORD_BYTES.items():
        parts = 2 if dtype.startswith("complex") else 1
        assert parts * word == DTYPES[dtype].itemsize


def test_every_name_is_that_of_its_codec() -> None:
    assert [codec_named(name).name for name in NAMES] == list(NAMES)
    with pytest.raises(ValueError, match=r"no codec 'lz4'.*zstd"):
        codec_named("lz4")
