"""Codes made by torch are those of the codecs, bit for bit, and only where that is proved."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as drawn

from tests.suites.codec_suite import awkward, numbers
from torch_ckpt.codecs.floats import GROUP, KINDS
from torch_ckpt.codecs.fp8 import ESCAPED, Fp8, Fp8Sqrt
from torch_ckpt.manifest.blocks import Piece, Placed
from torch_ckpt.staging import quantise
from torch_ckpt.staging.snapshot import Source

CODECS = {"fp8": Fp8(), "fp8-sqrt": Fp8Sqrt()}
SIZE = 1 << 19
CASES = [
    (dtype, name)
    for dtype in KINDS
    for name in awkward(dtype)
    if len(awkward(dtype)[name]) % 4 == 0
]


def words_of(numbers: torch.Tensor) -> np.ndarray:
    size = numbers.element_size()
    return numbers.view({2: torch.int16, 4: torch.int32}[size]).numpy().view(f"<u{size}")


def tensor_of(raw: bytes, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))


def assert_codes_alike(live: torch.Tensor, dtype: str) -> None:
    before = live.clone().view(torch.uint8)
    for name, codec in CODECS.items():
        codes, scales = codec.coded(words_of(live), KINDS[dtype])
        ours, our_scales = quantise.coded(live, name)
        assert np.array_equal(our_scales.numpy(), scales)
        kept = np.repeat(scales != ESCAPED, GROUP)[: len(codes)]
        assert np.array_equal(ours.numpy()[kept], codes[kept])
    assert torch.equal(live.view(torch.uint8), before), "the tensor itself stays as it is"


@pytest.mark.parametrize(("dtype", "name"), CASES)
def test_contents_that_codecs_stumble_over_get_the_same_codes(dtype: str, name: str) -> None:
    assert_codes_alike(tensor_of(awkward(dtype)[name], dtype), dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("count", [1, 127, 128, 129, 100_003])
def test_numbers_of_any_count_get_the_same_codes(dtype: str, count: int) -> None:
    assert_codes_alike(tensor_of(numbers(dtype, count), dtype), dtype)


def test_groups_get_the_same_scale_around_each_power_of_two() -> None:
    """448 is 0.875 times a power of two: there the scale changes."""
    powers = np.ldexp(np.float32(0.875), np.arange(-124, 127))
    near = [powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))]
    largest = np.concatenate([*near, np.ldexp(np.float32(1), np.arange(-124, 127))])
    groups = largest[:, None] * np.linspace(-1, 1, GROUP, dtype=np.float32)
    assert_codes_alike(torch.from_numpy(groups.astype(np.float32).reshape(-1)), "float32")
    assert_codes_alike(torch.from_numpy(np.abs(groups.astype(np.float32)).reshape(-1)), "float32")


def test_roots_are_rounded_to_the_nearest_number() -> None:
    """Of numbers right below an even power of two, one unit too much would escape the group."""
    bits = torch.tensor([0x7E7FFFFF], dtype=torch.int32)
    assert quantise.coded(bits.view(torch.float32), "fp8-sqrt")[1].tolist() == [182]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(sorted(KINDS)))
def test_any_bits_get_the_same_codes(data: st.DataObject, dtype: str) -> None:
    size = 4 if dtype == "float32" else 2
    bits = data.draw(drawn.arrays(f"<u{size}", st.integers(1, 300)))
    if data.draw(st.booleans()):  # within a range that few groups escape
        bits &= {"float32": 0x7E7FFFFF, "bfloat16": 0x7E7F, "float16": 0x6FFF}[dtype]
    assert_codes_alike(tensor_of(bits.tobytes(), dtype), dtype)


def test_the_proof_is_what_the_codecs_make_of_the_sample() -> None:
    for (dtype, name), digest in quantise.PROOF.items():
        sample = quantise.sample(dtype)
        codes, scales = CODECS[name].coded(words_of(sample), KINDS[dtype])
        assert quantise.fingerprint(torch.from_numpy(codes), torch.from_numpy(scales)) == digest
        assert 0 < (scales == ESCAPED).sum() < len(scales) * 0.7
        assert len(set(scales)) > 15
    assert set(quantise.PROOF) == {(dtype, name) for dtype in KINDS for name in CODECS}


def source_of(live: torch.Tensor, name: str = "exp_avg", start: int = 0) -> Source:
    shape = tuple(live.shape)
    dtype = str(live.dtype).removeprefix("torch.")
    piece = Piece(name, dtype, shape, (0,) * len(shape), shape)
    return Source(name, live, Placed(piece, start))


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "DEVICES", {"cpu"})


@pytest.mark.usefixtures("cpu")
def test_codes_lie_before_their_scales_however_they_are_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = tensor_of(numbers("float32", SIZE + 77), "float32")
    codes, scales = quantise.coded(live, "fp8")
    monkeypatch.setattr(quantise, "_CHUNK", 5 * GROUP)
    coding = quantise.Coding(quantise.Quantiser(), lambda name: "fp8")
    room = torch.zeros(live.nbytes, dtype=torch.uint8)
    source = source_of(live, start=64)
    assert coding.wants(source)
    assert coding.code(source, room)
    assert torch.equal(room[: len(codes)], codes)
    assert torch.equal(room[len(codes) : len(codes) + len(scales)], scales)
    assert not room[len(codes) + len(scales) :].any(), "the rest is nobody's"
    assert list(coding.escaped()) == []
    assert coding.quantised == [(64, "fp8")]
    assert coding.spared == live.nbytes - len(codes) - len(scales)


@pytest.mark.usefixtures("cpu")
def test_a_piece_with_an_escaped_group_is_none() -> None:
    lives = [torch.rand(SIZE) for _ in range(3)]
    lives[1][-1] = float("nan")
    coding = quantise.Coding(quantise.Quantiser(), lambda name: "fp8-sqrt")
    sources = [source_of(live, start=i * live.nbytes) for i, live in enumerate(lives)]
    for source in sources:
        assert coding.code(source, torch.zeros(source.live.nbytes, dtype=torch.uint8))
    assert list(coding.escaped()) == [sources[1]]
    assert coding.quantised == [(0, "fp8-sqrt"), (2 * lives[0].nbytes, "fp8-sqrt")]


@pytest.mark.usefixtures("cpu")
def test_only_large_plain_floats_that_a_rule_names_are_wanted() -> None:
    codec: dict[str, str | None] = {"exp_avg": "fp8", "weight": None}
    coding = quantise.Coding(quantise.Quantiser(), codec.get)
    fit = torch.rand(1024, 512)
    assert coding.wants(source_of(fit))
    unfit: dict[str, torch.Tensor] = {
        "small": torch.rand(1000),
        "strided": torch.rand(512, 1024).t(),
        "double": fit.double(),
        "whole numbers": fit.int(),
        "negated": torch._neg_view(fit),
    }
    for why, live in unfit.items():
        assert not coding.wants(source_of(live)), why
    assert not coding.wants(source_of(fit, "weight"))


def test_nothing_is_wanted_of_a_processor() -> None:
    coding = quantise.Coding(quantise.Quantiser(), lambda name: "fp8")
    assert not coding.wants(source_of(torch.rand(SIZE)))


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="denormals cannot be flushed here")
def test_a_device_that_computes_otherwise_is_left_alone_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found: list[Any] = []

    def flushing() -> None:
        """On a thread of its own, whose mode ends with it."""
        torch.set_flush_denormal(True)
        quantiser = quantise.Quantiser()
        live, room = torch.rand(SIZE), torch.zeros(4 * SIZE, dtype=torch.uint8)
        found.extend(quantiser.code(live, "fp8", room) for _ in range(2))
        found.append(bool(room.any()))

    thread = threading.Thread(target=flushing)
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join()
    assert found == [False, False, False]
    (line,) = caplog.messages
    assert line.startswith("cpu does not compute fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS)
def test_a_gpu_makes_the_same_codes(dtype: str) -> None:
    quantiser = quantise.Quantiser()
    for name, codec in CODECS.items():
        live = tensor_of(numbers(dtype, SIZE + 5), dtype)
        room = torch.zeros(live.nbytes, dtype=torch.uint8)
        assert quantiser.code(live.cuda(), name, room), "the device is as good as the codecs"
        torch.cuda.synchronize()
        codes, scales = codec.coded(words_of(live), KINDS[dtype])
        kept = np.repeat(scales != ESCAPED, GROUP)[: len(codes)]
        assert np.array_equal(room[len(codes) : len(codes) + len(scales)].numpy(), scales)
        assert np.array_equal(room[: len(codes)].numpy()[kept], codes[kept])
        for case in awkward(dtype).values():
            if len(case) % 4 == 0:
                ours = quantise.coded(tensor_of(case, dtype).cuda(), name)
                theirs = quantise.coded(tensor_of(case, dtype), name)
                assert quantise.fingerprint(*ours) == quantise.fingerprint(*theirs)
