"""What every codec promises, as tests to inherit: give the class a `codec`.

A lossy one also gives `bound`. Knows the Codec interface. Knows nothing of one kind of codec.
"""

from __future__ import annotations

import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_ckpt.codecs.codec import SAMPLE_BYTES, SAMPLES, Codec, CodecError
from torch_ckpt.codecs.names import NAMES, codec_named
from torch_ckpt.manifest.dtypes import DTYPES

FLOATS: dict[str, np.dtype] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
LENGTHS = [0, 1, 2, 3, 7, 16, 511, 512, 513, 4096, 20_001]
SCRATCH_BYTES = 1 << 20
"""What decoding may allocate beside a multiple of the block, whatever the stream claims."""

IN_A_CLASS = settings(
    max_examples=60, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow]
)


def numbers(dtype: str, count: int, seed: int = 0) -> bytes:
    """Numbers that look like weights; uniform integers for what is no float."""
    rng = np.random.default_rng(seed)
    if dtype in FLOATS:
        return (rng.standard_normal(count) * 0.02).astype(FLOATS[dtype]).tobytes()
    if dtype.startswith("complex"):
        width = {"complex128": "f8", "complex64": "f4", "complex32": "f2"}[dtype]
        return (rng.standard_normal(2 * count) * 0.02).astype(width).tobytes()
    small = rng.integers(0, 2 if dtype == "bool" else 100, count)
    return small.astype(f"u{DTYPES[dtype].itemsize}").tobytes()


def neighbour(raw: bytes, dtype: str, seed: int = 1) -> bytes:
    """What a block may have been a few steps earlier."""
    rng = np.random.default_rng(seed)
    if dtype in FLOATS:
        whole = len(raw) // FLOATS[dtype].itemsize * FLOATS[dtype].itemsize
        now = np.frombuffer(raw[:whole], FLOATS[dtype])
        with np.errstate(all="ignore"):
            wide = now.astype(np.float64)
            then = wide * (1 + 1e-3 * rng.standard_normal(len(wide)))
            return then.astype(now.dtype).tobytes() + raw[whole:]
    changed = np.frombuffer(raw, np.uint8).copy()
    changed[rng.random(len(changed)) < 0.05] ^= 1
    return changed.tobytes()


def awkward(dtype: str) -> dict[str, bytes]:
    """Contents that codecs stumble over, by name."""
    size = DTYPES[dtype].itemsize
    rng = random.Random(3)
    noise = rng.randbytes(3000 * size)
    found = {
        "random bytes": noise,
        "zeros": bytes(1000 * size),
        "ones everywhere": b"\xff" * (1000 * size),
        "one number": noise[:size] * 1000,
        "one number but the last": noise[:size] * 999 + noise[size : 2 * size],
        "repeats": noise[: 100 * size] * 20,
        "not whole words": noise[: 100 * size + size // 2 + 1],
    }
    if dtype in FLOATS:
        bits = np.dtype(f"<u{size}")
        inf = int(np.array(np.inf, FLOATS[dtype]).view(bits))
        numbers_ = np.frombuffer(numbers(dtype, 1000), bits)
        with_nans = numbers_.copy()
        with_nans[::7] = inf | np.arange(1, len(with_nans[::7]) + 1, dtype=bits) % 64
        with_nans[3::11] = inf
        with_nans[5::13] |= bits.type(1 << (8 * size - 1)) | bits.type(inf)
        denormal = np.arange(1000, dtype=bits) % 100
        mixed = numbers_.copy()
        mixed[::3] = denormal[::3]
        largest = np.full(1000, inf - 1, bits)
        largest[::2] |= bits.type(1 << (8 * size - 1))
        negative_zero = np.full(1000, 1 << (8 * size - 1), bits)
        found |= {
            "NaN payloads and infinities": with_nans.tobytes(),
            "only NaNs": np.full(300, inf + 5, bits).tobytes(),
            "denormals": denormal.tobytes(),
            "denormals among others": mixed.tobytes(),
            "the largest numbers": largest.tobytes(),
            "negative zeros": negative_zero.tobytes(),
        }
    return found


class CodecSuite:
    codec: Codec

    def bound(self, raw: bytes, dtype: str, base: bytes | None) -> np.ndarray:
        """For lossy codecs: how far each element may be off; NaN and inf may not be at all."""
        raise NotImplementedError

    def encode(self, raw: bytes, dtype: str, base: bytes | None) -> bytes | None:
        given = memoryview(base) if self.codec.needs_base and base is not None else None
        return self.codec.encode(memoryview(raw), dtype=dtype, base=given)

    def decode(self, stream: bytes, raw_bytes: int, base: bytes | None) -> memoryview:
        given = memoryview(base) if self.codec.needs_base and base is not None else None
        return self.codec.decode(memoryview(stream), raw_bytes=raw_bytes, base=given)

    def check(self, raw: bytes, dtype: str, base: bytes) -> bytes | None:
        """Encode, decode with what a reader knows, compare every element."""
        stream = self.encode(raw, dtype, base)
        if stream is None:
            return None
        assert len(stream) < len(raw)
        back = codec_named(self.codec.name).decode(
            memoryview(stream),
            raw_bytes=len(raw),
            base=memoryview(base) if self.codec.needs_base else None,
        )
        assert not back.readonly
        assert len(back) == len(raw)
        if self.codec.lossless:
            assert bytes(back) == raw
        else:
            self.compare(raw, bytes(back), dtype, base)
        return stream

    def compare(self, raw: bytes, back: bytes, dtype: str, base: bytes) -> None:
        """Every element within its bound; every NaN, infinity and odd byte exact."""
        kind = FLOATS[dtype]
        whole = len(raw) // kind.itemsize * kind.itemsize
        assert raw[whole:] == back[whole:]
        wanted, found = (np.frombuffer(data[:whole], kind) for data in (raw, back))
        with np.errstate(invalid="ignore"):  # signaling NaNs
            wide, back_wide = wanted.astype(np.float64), found.astype(np.float64)
        exact = ~np.isfinite(wide)
        bits = np.dtype(f"<u{kind.itemsize}")
        assert np.array_equal(wanted.view(bits)[exact], found.view(bits)[exact])
        allowed = self.bound(raw, dtype, base)
        assert allowed.shape == wanted.shape
        off = np.abs(back_wide[~exact] - wide[~exact])
        assert (off <= allowed[~exact]).all()

    def sample(self, count: int = 4000) -> tuple[bytes, str, bytes, bytes]:
        """A block of floats that this codec does encode: it, its type, its base, its stream."""
        raw = numbers("float32", count)
        base = neighbour(raw, "float32")
        stream = self.encode(raw, "float32", base)
        assert stream is not None
        return raw, "float32", base, stream

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_length_comes_back(self, dtype: str) -> None:
        for length in LENGTHS:
            raw = numbers(dtype, length)[:length]
            self.check(raw, dtype, neighbour(raw, dtype))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_awkward_contents_come_back(self, dtype: str) -> None:
        contents = awkward(dtype)
        for raw in contents.values():
            self.check(raw, dtype, neighbour(raw, dtype))
            self.check(raw, dtype, raw)
            self.check(raw, dtype, bytes(len(raw)))
            for other in contents.values():
                if len(other) >= len(raw):
                    self.check(raw, dtype, other[: len(raw)])

    @pytest.mark.parametrize("dtype", FLOATS)
    @IN_A_CLASS
    @given(data=st.data())
    def test_any_bytes_and_any_base_come_back(self, dtype: str, data: st.DataObject) -> None:
        size = DTYPES[dtype].itemsize
        few = st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=8)
        words, before = data.draw(few), data.draw(few)
        count = data.draw(st.integers(0, 400))
        rest = data.draw(st.binary(max_size=size - 1))
        picks = random.Random(data.draw(st.integers(0, 99)))
        raw = b"".join(picks.choices(words, k=count)) + rest
        base = b"".join(picks.choices(before, k=count)) + rest[::-1]
        self.check(raw, dtype, base)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8"])
    def test_unaligned_memory_is_read_where_it_lies(self, dtype: str) -> None:
        raw = numbers(dtype, 3000)
        base = neighbour(raw, dtype)
        aligned = self.encode(raw, dtype, base)
        for shift in (1, 3):
            raw_view = memoryview(bytes(shift) + raw)[shift:]
            base_view = memoryview(bytes(shift) + base)[shift:] if self.codec.needs_base else None
            stream = self.codec.encode(raw_view, dtype=dtype, base=base_view)
            assert stream == aligned
            if stream is not None:
                moved = memoryview(bytes(shift) + stream)[shift:]
                back = self.codec.decode(moved, raw_bytes=len(raw), base=base_view)
                assert bytes(back) == bytes(self.decode(stream, len(raw), base))

    def test_what_gains_nothing_is_not_encoded(self) -> None:
        noise = random.Random(1).randbytes(100_000)
        assert self.encode(noise, "uint8", noise[::-1]) is None
        assert self.encode(b"", "float32", b"") is None

    def test_numbers_like_weights_become_smaller(self) -> None:
        raw, _, _, stream = self.sample()
        assert len(stream) < 0.9 * len(raw)

    def test_encoding_twice_gives_the_same_stream_on_every_thread(self) -> None:
        raw, dtype, base, stream = self.sample(100_000)

        def again(_: int) -> bool:
            same = self.encode(raw, dtype, base) == stream
            return same and self.decode(stream, len(raw), base) == first

        first = self.decode(stream, len(raw), base)
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(again, range(12)))

    def test_decoded_memory_is_the_callers_own(self) -> None:
        raw, _, base, stream = self.sample()
        first = self.decode(stream, len(raw), base)
        first[:] = bytes(len(raw))
        second = self.decode(stream, len(raw), base)
        assert bytes(second) != bytes(len(raw))

    def test_the_estimate_is_near_what_comes_out(self) -> None:
        raw = numbers("float32", 1 << 19)
        base = neighbour(raw, "float32")
        views = memoryview(raw), memoryview(base) if self.codec.needs_base else None
        stream = self.encode(raw, "float32", base)
        assert stream is not None
        assert len(raw) > 2 * SAMPLES * SAMPLE_BYTES
        estimate = self.codec.estimate(views[0], dtype="float32", base=views[1])
        assert estimate == pytest.approx(len(raw) / len(stream), rel=0.05)
        empty = memoryview(b"") if self.codec.needs_base else None
        assert self.codec.estimate(memoryview(b""), dtype="float32", base=empty) == 1.0

    def test_every_prefix_and_every_longer_stream_is_refused(self) -> None:
        raw, _, base, stream = self.sample(300)
        for end in range(len(stream)):
            with pytest.raises(CodecError):
                self.decode(stream[:end], len(raw), base)
        for more in (b"\0", b"\xff" * 100, stream):
            with pytest.raises(CodecError, match="follow"):
                self.decode(stream + more, len(raw), base)

    def test_a_stream_of_another_length_is_refused(self) -> None:
        raw, _, base, stream = self.sample(300)
        for other in (0, 1, len(raw) - 4, len(raw) + 4, 2**32 + len(raw)):
            fitting = (base * 2)[:other] if other < 2**32 else None
            if self.codec.needs_base and fitting is None:
                continue
            with pytest.raises(CodecError):
                self.decode(stream, other, fitting)

    def test_a_stream_of_another_version_or_codec_is_refused(self) -> None:
        raw, _, base, stream = self.sample(300)
        later = stream[:4] + bytes([stream[4] + 1]) + stream[5:]
        with pytest.raises(CodecError, match="version"):
            self.decode(later, len(raw), base)
        for name in NAMES:
            other = codec_named(name)
            if other.name.partition("-")[0] == self.codec.name.partition("-")[0]:
                continue
            view = memoryview(base) if other.needs_base else None
            with pytest.raises(CodecError, match="begins with"):
                other.decode(memoryview(stream), raw_bytes=len(raw), base=view)

    def test_damaged_streams_are_refused_or_give_other_bytes_in_bounded_memory(self) -> None:
        raw, _, base, stream = self.sample(700)
        rng = random.Random(5)
        damaged = [bytearray(stream) for _ in range(800)]
        for index, bad in enumerate(damaged):
            if index < 400:  # headers stand at the start, and each of their bits matters
                at = index // 8 % len(bad)
                bad[at] ^= 1 << index % 8
            elif index < 600:
                bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            else:
                at = rng.randrange(len(bad))
                bad[at : at + 4] = rng.choice([b"\xff" * 4, rng.randbytes(4), bytes(4)])
        self.decode(stream, len(raw), base)  # this thread's own contexts are there
        for bad in damaged:
            tracemalloc.start()
            try:
                assert len(self.decode(bytes(bad), len(raw), base)) == len(raw)
            except CodecError:
                pass
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 16 * len(raw) + SCRATCH_BYTES

    def test_a_missing_surplus_or_misfitting_base_is_refused(self) -> None:
        raw, dtype, base, stream = self.sample(300)
        if not self.codec.needs_base:
            with pytest.raises(ValueError, match="takes no base"):
                self.codec.encode(memoryview(raw), dtype=dtype, base=memoryview(base))
            with pytest.raises(ValueError, match="takes no base"):
                self.codec.decode(memoryview(stream), raw_bytes=len(raw), base=memoryview(base))
            return
        with pytest.raises(ValueError, match="needs the block"):
            self.encode(raw, dtype, None)
        with pytest.raises(ValueError, match="needs the block"):
            self.decode(stream, len(raw), None)
        for other in (base[:-1], base + b"\0"):
            with pytest.raises(CodecError, match="base has"):
                self.encode(raw, dtype, other)
            with pytest.raises(CodecError, match="base has"):
                self.decode(stream, len(raw), other)

    def test_an_unknown_element_type_is_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match="float3"):
            self.encode(bytes(64), "float3", bytes(64))
