"""Direct writes: exact bytes from any alignment, in any order, next to buffered ones."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from torch_ckpt.storage.direct import DirectSink

PAGE = 4096


@pytest.fixture
def slab() -> Iterator[memoryview]:
    """Page-aligned memory with a pattern in it, as the writer's."""
    size = 512 * PAGE
    with mmap.mmap(-1, size) as memory:
        memory[:] = random.Random(0).randbytes(size)
        with memoryview(memory) as view:
            yield view


@pytest.mark.parametrize("tail", [0, 1, 511, 512, PAGE - 1])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_blocks_of_any_address_give_exact_bytes(
    tmp_path: Path, slab: memoryview, tail: int, shift: int
) -> None:
    size = 10 * PAGE + tail
    data = slab[shift : shift + size]
    sink = DirectSink(os.fspath(tmp_path / "x"), size)
    for start in reversed(range(0, size, 4 * PAGE)):
        sink.write_at(start, data[start : start + 4 * PAGE])
    sink.finish()
    assert (tmp_path / "x").read_bytes() == data


def test_pieces_of_any_offset_and_length_give_exact_bytes(tmp_path: Path, slab: memoryview) -> None:
    rng = random.Random(1)
    for round_ in range(20):
        size = rng.randrange(1, 300 * PAGE)
        inner = [rng.randrange(size) for _ in range(12)]
        inner = [cut - cut % PAGE if rng.random() < 0.5 else cut for cut in inner]
        cuts = sorted({0, size, *inner})
        pieces = list(pairwise(cuts))
        rng.shuffle(pieces)
        path = tmp_path / str(round_)
        sink = DirectSink(os.fspath(path), size)
        for a, b in pieces:
            sink.write_at(a, slab[a:b])
        sink.finish()
        assert path.read_bytes() == slab[:size]


def test_views_of_other_item_types_are_bytes(tmp_path: Path, slab: memoryview) -> None:
    sink = DirectSink(os.fspath(tmp_path / "x"), 2 * PAGE)
    sink.write_at(0, slab[: 2 * PAGE].cast("d"))  # pyright: ignore[reportArgumentType]
    sink.finish()
    assert (tmp_path / "x").read_bytes() == slab[: 2 * PAGE]


def test_memory_of_an_unaligned_size_can_be_released_after_writing(tmp_path: Path) -> None:
    memory = mmap.mmap(-1, PAGE + 1)
    with memoryview(memory) as view:
        sink = DirectSink(os.fspath(tmp_path / "x"), PAGE + 1)
        sink.write_at(0, view)
        sink.finish()
    memory.close()  # fails if the sink still held the buffer


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(
    "fault", ["", "pwrite64:error=EINVAL:when=1", "pwrite64:retval=4096:when=1"]
)
def test_an_aligned_block_is_one_call_and_refusals_are_survived(tmp_path: Path, fault: str) -> None:
    code = (
        "import mmap, sys; from torch_ckpt.storage.direct import DirectSink\n"
        "m = mmap.mmap(-1, 16 * 4096); m[:] = bytes(range(256)) * 256\n"
        "k = DirectSink(sys.argv[1], 12 * 4096 + 9)\n"
        "k.write_at(0, memoryview(m)[:8 * 4096])\n"
        "k.write_at(8 * 4096, memoryview(m)[8 * 4096:12 * 4096 + 9])\n"
        "k.finish()\n"
    )
    log, path = tmp_path / "log", tmp_path / "x"
    command = ["strace", "-f", "-qq", "-o", os.fspath(log), "-e", "trace=pwrite64"]
    command += ["-e", f"inject={fault}"] if fault else []
    done = subprocess.run(
        [*command, sys.executable, "-c", code, os.fspath(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    data = (bytes(range(256)) * 256)[: 12 * PAGE + 9]
    calls = log.read_text().splitlines()
    if "retval" in fault:  # the call was not made, so its page is a hole; the rest must be there
        assert path.read_bytes()[PAGE:] == data[PAGE:]
    else:
        assert path.read_bytes() == data
    assert len(calls) == (4 if fault else 3)  # a block; a block and its padded tail
    assert calls[-1].split(", ")[-2] == "4096"
