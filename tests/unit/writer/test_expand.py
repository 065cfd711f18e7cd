"""Codes in a slab become, in place, the values that a reader of the stored block would get."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.suites.codec_suite import numbers
from torch_ckpt.codecs.floats import ITEMSIZE, KINDS
from torch_ckpt.codecs.fp8 import Fp8, Fp8Sqrt
from torch_ckpt.errors import SaveFailed
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.writer.encode import Encoder, Encoding
from torch_ckpt.writer.expand import expand
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.rules import rules_of
from torch_ckpt.writer.shard import write_shard

CODECS = {"fp8": Fp8(), "fp8-sqrt": Fp8Sqrt()}
BEFORE = 4 * 1000
"""Bytes of a neighbour in the same slab."""


def moments(codec: str, dtype: str, count: int) -> bytes:
    raw = numbers(dtype, count)
    if codec == "fp8-sqrt":  # without signs
        words = np.frombuffer(raw, f"<u{len(raw) // count}")
        return (words & words.dtype.type(np.iinfo(words.dtype).max >> 1)).tobytes()
    return raw


def coded(raw: bytes, codec: str, dtype: str) -> bytes:
    """What a device puts in the place of moments."""
    kind = KINDS[dtype]
    codes, scales = CODECS[codec].coded(np.frombuffer(raw, f"<u{ITEMSIZE[kind]}"), kind)
    return (codes.tobytes() + scales.tobytes()).ljust(len(raw), b"\xaa")


def job_of(codec: str, dtype: str, count: int, root: str = "") -> Job:
    size = BEFORE + count * ITEMSIZE[KINDS[dtype]]
    return Job(
        root=root,
        folder="step-0000000002",
        step=2,
        attempt="00000002",
        run="r" * 8,
        rank=0,
        world_size=1,
        created="2026-01-01T00:00:00.000+00:00",
        pieces=[
            ["before", "uint8", [BEFORE], [0], [BEFORE], 0],
            ["exp_avg", dtype, [count], [0], [count], BEFORE],
        ],
        raw_bytes=size,
        quantised=[[BEFORE, codec]],
    )


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [1 << 19, (1 << 21) + 12_345])
def test_a_piece_gets_the_values_of_its_stream_and_nothing_else_is_touched(
    dtype: str, codec: str, count: int
) -> None:
    raw = moments(codec, dtype, count)
    job = job_of(codec, dtype, count)
    around = b"\x55" * BEFORE
    slab = memoryview(bytearray(around + coded(raw, codec, dtype) + around))
    with ThreadPoolExecutor(4) as pool:
        expand(job, job.placed(), slab, pool)
    stream = CODECS[codec].encode(memoryview(raw), dtype=dtype)
    assert stream is not None
    wanted = CODECS[codec].decode(memoryview(stream), raw_bytes=len(raw))
    assert slab[BEFORE:-BEFORE] == wanted
    assert slab[:BEFORE] == slab[-BEFORE:] == around


@pytest.mark.parametrize(
    ("quantised", "said"),
    [
        ([[BEFORE + 4, "fp8"]], "no tensor begins"),
        ([[0, "fp8"]], "before cannot be read: uint8"),
        ([[BEFORE, "zstd"]], "float32 as zstd"),
        ([[BEFORE, "fp8"]], "scale is out of range"),
    ],
)
def test_what_is_no_codes_is_refused(quantised: list[list[object]], said: str) -> None:
    job = replace(job_of("fp8", "float32", 1 << 18), quantised=quantised)
    slab = memoryview(bytearray(b"\xff" * job.raw_bytes))
    with ThreadPoolExecutor(1) as pool, pytest.raises(SaveFailed, match=said):
        expand(job, job.placed(), slab, pool)


def test_codes_never_reach_a_shard_as_they_are(tmp_path: Path) -> None:
    job = job_of("fp8", "float32", 1 << 18, str(tmp_path))
    slab = memoryview(bytearray(job.raw_bytes))
    store = LocalStore(str(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(SaveFailed, match="codes"):
            write_shard(job, job.placed(), slab, store, pool)
        encoder = Encoder(Encoding(rules=rules_of("raw", "fp8", None)[1]))
        with pytest.raises(SaveFailed, match="the next save loses nothing"):
            encoder.write(job, job.placed(), slab, store, pool, late=False)
    assert not list(tmp_path.rglob("*.*"))
