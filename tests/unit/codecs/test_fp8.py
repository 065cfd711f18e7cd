"""The 8-bit codecs pass the suite, round as the reference does, and keep what they cannot hold."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.suites.codec_suite import FLOATS, CodecSuite, numbers
from torch_ckpt.codecs.codec import CodecError
from torch_ckpt.codecs.floats import GROUP, KINDS, narrow, widen
from torch_ckpt.codecs.fp8 import ESCAPED, Fp8, Fp8Sqrt
from torch_ckpt.codecs.streams import HEADER, PLANE, STORED

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


class TestFp8(CodecSuite):
    codec = Fp8()

    def bound(self, raw: bytes, dtype: str, base: bytes | None) -> np.ndarray:
        assert isinstance(self.codec, Fp8)
        return self.codec.bound(memoryview(raw), dtype=dtype)

    @pytest.mark.parametrize("dtype", ["float64", "complex64", "int32", "uint8", "float8_e4m3fn"])
    def test_what_is_no_float_of_16_or_32_bits_is_left_alone(self, dtype: str) -> None:
        raw = bytes(4096)
        assert self.codec.encode(memoryview(raw), dtype=dtype) is None
        assert self.codec.estimate(memoryview(raw), dtype=dtype) == 1.0

    @pytest.mark.parametrize("dtype", KINDS)
    def test_every_element_is_within_the_documented_bound(self, dtype: str) -> None:
        raw, wide = moments(dtype, signed=True)
        stream = self.check(raw, dtype, raw)
        assert stream is not None
        largest = np.repeat(np.abs(wide.reshape(-1, GROUP)).max(axis=1), GROUP)
        allowed = self.bound(raw, dtype, None)
        assert np.array_equal(allowed, 2.0**-4 * np.abs(wide) + 2.0**-17 * largest)

    def test_it_rounds_as_the_reference_does(self) -> None:
        """Groups whose maximum is 448 have the scale 1, so decoding gives the reference's value."""
        every = np.arange(0, 0x43E00000, 997).astype(np.uint32).view(np.float32)  # 0 … 448
        ties = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
        ties = np.concatenate([ties, (ties[1:] + ties[:-1]) / 2])
        values = np.concatenate([every, ties, -every, -ties])
        groups = np.full((-(-len(values) // (GROUP - 1)), GROUP), 448, np.float32)
        groups[:, 1:] = np.resize(values, (len(groups), GROUP - 1))
        raw = groups.tobytes()
        stream = self.encode(raw, "float32", None)
        assert stream is not None
        found = np.frombuffer(self.decode(stream, len(raw), None), np.float32)
        wanted = groups.reshape(-1).astype(E4M3).astype(np.float32)
        assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))

    def test_what_it_gives_back_it_encodes_without_further_loss(self) -> None:
        raw, dtype, base, stream = self.sample()
        back = bytes(self.decode(stream, len(raw), base))
        again = self.encode(back, dtype, base)
        assert again is not None
        assert bytes(self.decode(again, len(raw), base)) == back

    @pytest.mark.parametrize("dtype", KINDS)
    def test_nor_does_anything_else_that_codes_can_hold(self, dtype: str) -> None:
        """Of every magnitude and spread; bits that a narrow type or a tiny square cannot hold."""
        assert isinstance(self.codec, Fp8)
        rng, size, kind = np.random.default_rng(4), FLOATS[dtype].itemsize, KINDS[dtype]
        mantissa = {"float32": 23, "bfloat16": 7, "float16": 10}[dtype]
        most = (1 << (8 * size - 1 - mantissa)) - 2
        centre = rng.integers(0, most, (3000, 1))
        exponent = np.clip(centre - rng.integers(0, 24, (3000, GROUP)), 0, most)
        bits = exponent << mantissa | rng.integers(0, 1 << mantissa, (3000, GROUP))
        words = bits.reshape(-1).astype(f"<u{size}")
        codes, scales = self.codec.coded(words, kind)
        held = scales != ESCAPED
        assert held.mean() > 0.4
        once = np.empty(held.sum() * GROUP, words.dtype)
        self.codec.values_into(once, codes[np.repeat(held, GROUP)], scales[held], kind)
        stream = self.encode(once.tobytes(), dtype, None)
        assert stream is not None
        assert bytes(self.decode(stream, once.nbytes, None)) == once.tobytes()

    @pytest.mark.parametrize("scale", [0, 247, 254])
    def test_a_scale_out_of_range_is_refused(self, scale: int) -> None:
        planes = [bytes([scale]), bytes(8), *[b""] * 4]
        assert isinstance(self.codec, Fp8)
        stream = HEADER.pack(self.codec.mark, 1, 1, 0, 32)
        stream += b"".join(PLANE.pack(STORED, len(p)) + p for p in planes)
        with pytest.raises(CodecError, match="scale"):
            self.decode(stream, 32, None)

    def test_an_escaped_group_costs_the_others_nothing(self) -> None:
        whole = np.frombuffer(numbers("float32", 10 * GROUP), np.float32).copy()
        plain = self.decode(self.encoded(whole), whole.nbytes, None)
        whole[3 * GROUP + 5] = np.nan
        back = self.decode(self.encoded(whole), whole.nbytes, None)
        exact = slice(3 * GROUP * 4, 4 * GROUP * 4)
        assert bytes(back[exact]) == whole.tobytes()[exact]
        assert bytes(back[: exact.start]) == bytes(plain[: exact.start])
        assert bytes(back[exact.stop :]) == bytes(plain[exact.stop :])

    def encoded(self, values: np.ndarray) -> bytes:
        stream = self.encode(values.tobytes(), "float32", None)
        assert stream is not None
        return stream


class TestFp8Sqrt(TestFp8):
    codec = Fp8Sqrt()

    def sample(self, count: int = 4000) -> tuple[bytes, str, bytes, bytes]:
        raw = (np.frombuffer(numbers("float32", count), np.float32) ** 2).tobytes()
        stream = self.encode(raw, "float32", None)
        assert stream is not None
        return raw, "float32", raw, stream

    @pytest.mark.parametrize("dtype", KINDS)
    def test_every_element_is_within_the_documented_bound(self, dtype: str) -> None:
        raw, wide = moments(dtype, signed=False)
        stream = self.check(raw, dtype, raw)
        assert stream is not None
        back = self.decode(stream, len(raw), None)
        found = np.frombuffer(back, FLOATS[dtype]).astype(np.float64)
        assert np.array_equal(found == 0, wide == 0)

    @pytest.mark.parametrize("dtype", KINDS)
    def test_what_is_not_zero_never_becomes_zero(self, dtype: str) -> None:
        values = np.zeros(64 * GROUP, FLOATS[dtype])
        values[::3] = 1.0
        values[1::3].view(f"u{values.itemsize}")[:] = np.arange(len(values[1::3])) % 500 + 1
        stream = self.check(values.tobytes(), dtype, b"")
        assert stream is not None
        back = np.frombuffer(self.decode(stream, values.nbytes, None), values.dtype)
        assert np.array_equal(back == 0, values == 0)

    def test_it_rounds_as_the_reference_does(self) -> None:
        roots = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
        raw = (np.resize(roots[::-1], GROUP) ** 2).tobytes() * 4
        stream = self.encode(raw, "float32", None)
        assert stream is not None
        assert bytes(self.decode(stream, len(raw), None)) == raw

    def test_numbers_below_zero_are_exact(self) -> None:
        values = np.random.default_rng(0).random(100 * GROUP).astype(np.float32)
        values[7 * GROUP] = -1e-30
        stream = self.encoded(values)
        back = np.frombuffer(self.decode(stream, values.nbytes, None), np.float32)
        assert np.array_equal(back[7 * GROUP : 8 * GROUP], values[7 * GROUP : 8 * GROUP])
        assert not np.array_equal(back, values)

    def test_the_estimate_is_near_what_comes_out(self) -> None:
        raw = (np.frombuffer(numbers("float32", 1 << 19), np.float32) ** 2).tobytes()
        stream = self.encode(raw, "float32", None)
        assert stream is not None
        estimate = self.codec.estimate(memoryview(raw), dtype="float32")
        assert estimate == pytest.approx(len(raw) / len(stream), rel=0.05)

    def test_numbers_like_weights_become_smaller(self) -> None:
        raw, _, _, stream = self.sample()
        assert len(stream) < 0.3 * len(raw)


def moments(dtype: str, *, signed: bool) -> tuple[bytes, np.ndarray]:
    """Numbers over many decades, also within a group, with zeros; and the same as float64."""
    rng = np.random.default_rng(2)
    values = np.exp(rng.normal(-6, 4, 300 * GROUP))
    values[rng.random(len(values)) < 0.1] = 0
    if signed:
        values *= rng.choice([-1, 1], len(values))
    info = ml_dtypes.finfo(FLOATS[dtype])
    stored = np.clip(values, -float(info.max) / 8, float(info.max) / 8).astype(FLOATS[dtype])
    return stored.tobytes(), stored.astype(np.float64)


@pytest.mark.parametrize("dtype", KINDS)
def test_every_number_of_16_bits_is_widened_exactly_and_narrowed_back(dtype: str) -> None:
    kind = FLOATS[dtype]
    if kind.itemsize == 2:
        words = np.arange(1 << 16, dtype="<u2")
    else:
        words = np.random.default_rng(0).integers(0, 1 << 32, 10_000, dtype="<u4")
    wide = widen(words, KINDS[dtype])
    finite = np.isfinite(wide)
    assert np.array_equal(wide[finite], words.view(kind).astype(np.float32)[finite])
    assert np.array_equal(narrow(wide[finite], KINDS[dtype]), words[finite])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrowing_rounds_as_the_reference_does(dtype: str) -> None:
    values = np.frombuffer(numbers("float32", 100_000), np.float32)
    values = np.concatenate([values, values * np.float32(1e-36), values * np.float32(1e-5)])
    ours = narrow(values, KINDS[dtype])
    assert np.array_equal(ours, values.astype(FLOATS[dtype]).view(np.uint16))
