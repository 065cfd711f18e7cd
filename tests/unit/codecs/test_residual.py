"""The lossy delta passes the suite, keeps its bound, and is exact where it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from tests.suites.codec_suite import FLOATS, CodecSuite, numbers
from torch_ckpt.codecs.codec import Codec
from torch_ckpt.codecs.floats import GROUP, KINDS
from torch_ckpt.codecs.names import codec_named
from torch_ckpt.codecs.residual import LossyDelta


class TestLossyDelta(CodecSuite):
    codec: Codec = LossyDelta()

    def bound(self, raw: bytes, dtype: str, base: bytes | None) -> np.ndarray:
        assert base is not None
        assert isinstance(self.codec, LossyDelta)
        return self.codec.bound(memoryview(raw), dtype=dtype, base=memoryview(base))

    @pytest.mark.parametrize("dtype", KINDS)
    @pytest.mark.parametrize("length", [1, 127, 128, 129, 40_000])
    def test_every_element_is_within_error_times_its_groups_change(
        self, dtype: str, length: int
    ) -> None:
        assert isinstance(self.codec, LossyDelta)
        raw, base = updated(dtype, length)
        self.check(raw, dtype, base)
        now, then = (np.frombuffer(b, FLOATS[dtype]).astype(np.float64) for b in (raw, base))
        allowed = self.bound(raw, dtype, base)
        for start in range(0, length, GROUP):
            group = slice(start, start + GROUP)
            rms = np.sqrt(np.mean((now[group] - then[group]) ** 2))
            assert allowed[group] == pytest.approx(self.codec.error * rms, rel=1e-12)

    def test_what_did_not_change_is_exact_and_nearly_free(self) -> None:
        raw, base = updated("float32", 100 * GROUP)
        still = raw[: 40 * GROUP * 4] + base[40 * GROUP * 4 :]
        stream = self.check(still, "float32", base)
        whole = self.check(raw, "float32", base)
        assert stream is not None
        assert whole is not None
        assert len(stream) < 0.45 * len(whole)
        back = self.decode(stream, len(raw), base)
        assert bytes(back[40 * GROUP * 4 :]) == base[40 * GROUP * 4 :]

    def test_zeros_of_either_sign_are_kept_in_groups_that_did_not_change_there(self) -> None:
        values = np.frombuffer(numbers("float32", GROUP * 4), np.float32).copy()
        values[::2] = -0.0
        values[1::4] = 0.0
        now = values.copy()
        now[3::4] *= np.float32(1.001)
        stream = self.check(now.tobytes(), "float32", values.tobytes())
        assert stream is not None
        back = np.frombuffer(self.decode(stream, now.nbytes, values.tobytes()), np.float32)
        still = values == 0
        assert np.array_equal(back[still].view(np.uint32), values[still].view(np.uint32))

    def test_nothing_above_zero_sinks_to_zero_where_nothing_is_below(self) -> None:
        """An optimizer divides by the root of a second moment."""
        rng = np.random.default_rng(0)
        base = (rng.lognormal(-18, 4, 200 * GROUP)).astype(np.float32)
        now = base * rng.uniform(0, 2, len(base)).astype(np.float32)
        stream = self.check(now.tobytes(), "float32", base.tobytes())
        back = now
        if stream is not None:
            data = self.decode(stream, now.nbytes, base.tobytes())
            back = np.frombuffer(data, np.float32)
        assert (back[now > 0] > 0).all()

    def test_a_group_with_one_number_that_is_none_is_exact_and_the_others_are_not(self) -> None:
        raw, base = updated("float32", 100 * GROUP)
        for odd in (np.nan, np.inf, 3e38):
            now = np.frombuffer(raw, np.float32).copy()
            now[5 * GROUP + 7] = odd
            stream = self.check(now.tobytes(), "float32", base)
            assert stream is not None
            back = np.frombuffer(self.decode(stream, len(raw), base), np.float32)
            there = slice(5 * GROUP, 6 * GROUP)
            assert back[there].tobytes() == now[there].tobytes()
            assert not np.array_equal(back[6 * GROUP :], now[6 * GROUP :])

    def test_errors_do_not_add_up_when_each_base_is_what_a_reader_gets(self) -> None:
        assert isinstance(self.codec, LossyDelta)
        rng = np.random.default_rng(4)
        truth = np.frombuffer(numbers("float32", 50 * GROUP), np.float32).copy()
        held = truth.tobytes()
        for _ in range(20):
            truth = truth + (1e-4 * rng.standard_normal(len(truth))).astype(np.float32)
            stream = self.check(truth.tobytes(), "float32", held)
            assert stream is not None
            held = bytes(self.decode(stream, len(held), held))
            off = np.abs(np.frombuffer(held, np.float32) - truth).max()
            assert off < 2 * self.codec.error * 1e-4  # one step's change, not the sum of twenty


class TestCoarseLossyDelta(TestLossyDelta):
    codec = LossyDelta(0.5)


class TestFineLossyDelta(TestLossyDelta):
    codec = LossyDelta(2.0**-10)


def updated(dtype: str, count: int) -> tuple[bytes, bytes]:
    """Weights, and what they were a little earlier."""
    rng = np.random.default_rng(6)
    then = (rng.standard_normal(count) * 0.02).astype(FLOATS[dtype])
    change = rng.standard_normal(count) * np.exp(rng.normal(-7, 1, count))
    return (then.astype(np.float64) + change).astype(FLOATS[dtype]).tobytes(), then.tobytes()


def test_reading_needs_no_setting_of_the_writer() -> None:
    raw, base = updated("float32", 1000)
    stream = LossyDelta(0.3).encode(memoryview(raw), dtype="float32", base=memoryview(base))
    assert stream is not None
    found = [
        codec.decode(memoryview(stream), raw_bytes=len(raw), base=memoryview(base))
        for codec in (LossyDelta(0.01), codec_named("lossy-delta"))
    ]
    assert found[0] == found[1]


def test_a_larger_error_makes_smaller_streams() -> None:
    raw, base = (memoryview(block) for block in updated("float32", 1 << 16))
    streams = [
        LossyDelta(error).encode(raw, dtype="float32", base=base) for error in (0.01, 0.06, 0.3)
    ]
    sizes = [len(stream) for stream in streams if stream is not None]
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < 0.5 * sizes[0]


@pytest.mark.parametrize("error", [0.0, -1.0, 0.0001, 0.6, float("nan"), float("inf")])
def test_an_error_out_of_range_is_refused(error: float) -> None:
    with pytest.raises(ValueError, match="error of a lossy delta must be"):
        LossyDelta(error)


def test_bfloat16_that_moved_by_single_steps_is_exact() -> None:
    """The bound is then narrower than the type itself, so nothing may be lost."""
    rng = np.random.default_rng(0)
    then = (rng.random(1 << 14) * 0.5 + 0.5).astype(FLOATS["bfloat16"])
    now = (then.view(np.uint16) + rng.integers(-2, 3, len(then)).astype(np.uint16)).tobytes()
    base = memoryview(then.tobytes())
    stream = LossyDelta().encode(memoryview(now), dtype="bfloat16", base=base)
    assert stream is not None
    assert len(stream) < 0.3 * len(now)
    codec = codec_named("lossy-delta")
    assert bytes(codec.decode(memoryview(stream), raw_bytes=len(now), base=base)) == now
