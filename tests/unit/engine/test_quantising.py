"""Moments are copied as codes where that is safe, and come back as if the writer had encoded them.

The processor plays the device.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import chains, moments
from tests.moments import WAIT_S, Run, assert_exact, assert_read, loaded
from torch_ckpt import Checkpointer, SaveFailed, load_generation
from torch_ckpt.cli.main import run as command
from torch_ckpt.staging import quantise

MOMENTS_BYTES = 2 * moments.SHAPE[0] * moments.SHAPE[1] * 4
CODED_BYTES = MOMENTS_BYTES // 4 * 129 // 128


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "DEVICES", {"cpu"})


def fp8(root: Path, **options: Any) -> Checkpointer:
    return Checkpointer(root, **{"moments": "fp8", "keep": None, **options})


def lossy(root: Path) -> list[int]:
    return sorted(step for step, one in chains.by_step(root).items() if "lossy" in one.tags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("incremental", [False, True])
def test_they_come_back_as_the_writer_would_have_stored_them(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    dtype: torch.dtype,
    incremental: bool,
) -> None:
    run = Run(dtype)
    done = run.saved_in(tmp_path, 1, 2, 3, incremental=incremental)
    size = run.weight.element_size()
    spared = MOMENTS_BYTES * size // 4 - CODED_BYTES
    assert [one.bytes - one.copied for one in done] == [0, spared, spared]
    assert lossy(tmp_path) == [2, 3]
    assert_exact(tmp_path, run, 1)
    for step in (2, 3):
        assert_read(tmp_path, run, step)
    chains.assert_sound(tmp_path)
    assert command(["show", str(tmp_path), "3"]) == 0
    said = capsys.readouterr().out
    assert "fp8 for *exp_avg, fp8-sqrt for *exp_avg_sq" in said


def test_a_lossless_one_comes_after_every_few(tmp_path: Path) -> None:
    run = Run()
    done = run.saved_in(tmp_path, *range(1, 9), full_every=3)
    whole = [one.step for one in done if one.copied == one.bytes]
    assert whole == [1, 5], "every other was certain to have one beside it"
    assert lossy(tmp_path) == [2, 3, 4, 6, 7, 8]
    assert_exact(tmp_path, run, 5)
    assert_read(tmp_path, run, 8)


def test_a_step_right_after_the_save_changes_nothing_of_it(tmp_path: Path) -> None:
    run = Run()
    with fp8(tmp_path) as checkpointer:
        run.save(checkpointer, 1).wait(timeout_s=WAIT_S)
        for step in (2, 3, 4):
            pending = run.save(checkpointer, step)
            for _ in range(3):
                run.step(1000 + step)
            pending.wait(timeout_s=WAIT_S)
            assert pending.copied < pending.bytes
    for step in (2, 3, 4):
        assert_read(tmp_path, run, step)


def test_what_no_code_can_hold_is_copied_whole_and_kept_exactly(tmp_path: Path) -> None:
    run = Run()
    with fp8(tmp_path) as checkpointer:
        run.save(checkpointer, 1).wait(timeout_s=WAIT_S)
        run.step(2)
        run.moments["exp_avg"][3, 500] = float("nan")
        pending = run.save_again(checkpointer, 2)
        pending.wait(timeout_s=WAIT_S)
    assert pending.bytes - pending.copied == (MOMENTS_BYTES - CODED_BYTES) // 2, "of the other one"
    assert lossy(tmp_path) == [2]
    assert_read(tmp_path, run, 2)
    first = (3 * moments.SHAPE[1] + 500) // 128 * 128
    for name in ("exp_avg", "exp_avg_sq"):
        found, saved = loaded(tmp_path, 2)[name].view(-1), run.saved[2][name].view(-1)
        here = slice(first, first + 128)
        same = torch.equal(found[here].view(torch.int32), saved[here].view(torch.int32))
        assert same == (name == "exp_avg")


def test_what_does_not_change_is_stored_once_and_still_called_lossy(tmp_path: Path) -> None:
    run = Run()
    with fp8(tmp_path, incremental=True) as checkpointer:
        for step in (1, 2):
            run.save(checkpointer, step).wait(timeout_s=WAIT_S)
        run.save_again(checkpointer, 3).wait(timeout_s=WAIT_S)
    found = chains.by_step(tmp_path)
    assert found[3].manifest.bytes == 0
    assert lossy(tmp_path) == [2, 3]
    assert set(found[3].manifest.bases) == {1, 2}
    assert_read(tmp_path, run, 3)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, {"tags": ("permanent",)}),
        ({}, {"folder": "best"}),
        ({}, {"block": "staged"}),
        ({}, {"block": "committed"}),
        ({"mode": "sync"}, {}),
        ({"moments": None, "codec": {"*exp_avg": "fp8", "*exp_avg_sq": "fp8-sqrt"}}, {}),
    ],
)
def test_a_save_that_may_have_to_be_whole_is_copied_whole(
    tmp_path: Path, options: dict[str, Any], how: dict[str, Any]
) -> None:
    run = Run()
    with fp8(tmp_path, **options) as checkpointer:
        run.save(checkpointer, 1).wait(timeout_s=WAIT_S)
        pending = run.save(checkpointer, 2, **how)
        pending.wait(timeout_s=WAIT_S)
    assert pending.copied == pending.bytes
    if "tags" in how:
        assert_exact(tmp_path, run, 2)
        assert lossy(tmp_path) == []
    chains.assert_sound(tmp_path)


def test_what_an_archive_keeps_for_ever_is_copied_whole(tmp_path: Path) -> None:
    run, root, archive = Run(), tmp_path / "root", tmp_path / "archive"
    options = {"archive": archive, "cache": tmp_path / "cache", "permanent_every": 3}
    done = run.saved_in(root, 1, 2, 3, 4, **options)
    assert [one.copied == one.bytes for one in done] == [True, False, True, False]
    for place in (root, archive):
        assert_exact(place, run, 3)
        assert_read(place, run, 4)
        chains.assert_sound(place)
    assert_read(tmp_path / "cache", run, 4)


def test_one_slab_is_enough(tmp_path: Path) -> None:
    run = Run()
    done = run.saved_in(tmp_path, 1, 2, slabs=1)
    assert done[1].copied < done[1].bytes
    assert_read(tmp_path, run, 2)


def test_until_a_commit_is_known_the_next_save_is_copied_whole(tmp_path: Path) -> None:
    run = Run()
    with fp8(tmp_path) as checkpointer:
        run.save(checkpointer, 1).wait(timeout_s=WAIT_S)
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        try:
            second, third = (run.save(checkpointer, step) for step in (2, 3))
        finally:
            os.kill(checkpointer.writer_pid, signal.SIGCONT)
        checkpointer.wait(timeout_s=WAIT_S)
    assert second.copied < second.bytes
    assert third.copied == third.bytes
    for step in (2, 3):
        assert_read(tmp_path, run, step)


def test_without_its_anchor_a_save_fails_with_one_line_and_the_next_one_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    with fp8(tmp_path) as checkpointer:
        for step in (1, 2):
            run.save(checkpointer, step).wait(timeout_s=WAIT_S)
        shutil.rmtree(tmp_path / "step-0000000001")
        third = run.save(checkpointer, 3)
        with caplog.at_level(logging.WARNING), pytest.raises(SaveFailed, match="as 8-bit codes"):
            third.wait(timeout_s=WAIT_S)
        assert len(caplog.messages) == 1
        fourth = run.save(checkpointer, 4)
        fourth.wait(timeout_s=WAIT_S)
        assert fourth.copied == fourth.bytes
        run.save(checkpointer, 5).wait(timeout_s=WAIT_S)
        with pytest.raises(SaveFailed, match="8-bit"):
            checkpointer.wait(timeout_s=WAIT_S)
    assert sorted(chains.by_step(tmp_path)) == [2, 4, 5]
    assert_exact(tmp_path, run, 4)
    assert_read(tmp_path, run, 5)


def test_one_that_the_user_removes_is_no_anchor(tmp_path: Path) -> None:
    run = Run()
    with fp8(tmp_path) as checkpointer:
        run.save(checkpointer, 1).wait(timeout_s=WAIT_S)
        checkpointer.remove("step-0000000001")
        second = run.save(checkpointer, 2)
        second.wait(timeout_s=WAIT_S)
    assert second.copied == second.bytes
    chains.assert_sound(tmp_path)


def test_a_writer_that_dies_with_codes_costs_that_save_and_no_other(tmp_path: Path) -> None:
    run = Run()
    with fp8(tmp_path) as checkpointer:
        run.save(checkpointer, 1).wait(timeout_s=WAIT_S)
        writer = checkpointer.writer_pid
        assert writer is not None
        os.kill(writer, signal.SIGSTOP)
        pending = run.save(checkpointer, 2)
        pending.wait("staged", timeout_s=WAIT_S)
        assert pending.copied < pending.bytes
        os.kill(writer, signal.SIGKILL)
        with pytest.raises(SaveFailed):
            pending.wait(timeout_s=WAIT_S)
        done = []
        for step in (3, 4):
            done.append(run.save(checkpointer, step))
            done[-1].wait(timeout_s=WAIT_S)
        with pytest.raises(SaveFailed):
            checkpointer.wait(timeout_s=WAIT_S)
    assert [one.copied == one.bytes for one in done] == [True, False]
    assert sorted(chains.by_step(tmp_path)) == [1, 3, 4]
    assert_exact(tmp_path, run, 3)
    assert_read(tmp_path, run, 4)


def test_after_a_writer_died_between_saves_the_next_one_is_copied_whole(tmp_path: Path) -> None:
    run = Run()
    with fp8(tmp_path) as checkpointer:
        first = run.save(checkpointer, 1)
        first.wait(timeout_s=WAIT_S)
        assert first.anchors_next
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        while checkpointer.writer_pid is not None or first.anchors_next:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        second = run.save(checkpointer, 2)
        second.wait(timeout_s=WAIT_S)
    assert second.copied == second.bytes
    assert_exact(tmp_path, run, 2)


def test_after_a_resume_the_first_save_is_copied_whole(tmp_path: Path) -> None:
    run = Run()
    with fp8(tmp_path) as checkpointer:
        for step in (1, 2):
            run.save(checkpointer, step).wait(timeout_s=WAIT_S)
        assert checkpointer.resume(run.state, step=1) is not None
        done = []
        for step in (3, 4):
            done.append(run.save(checkpointer, step))
            done[-1].wait(timeout_s=WAIT_S)
    assert done[0].copied == done[0].bytes
    for one in chains.by_step(tmp_path).values():
        assert load_generation(tmp_path, folder=one.folder)
    chains.assert_sound(tmp_path)


WITHOUT_MEMFD = """
import os, sys
del os.memfd_create
from tests.moments import Run, as_device, assert_read
as_device()
run = Run()
done = run.saved_in(sys.argv[1], 1, 2)
assert done[1].copied < done[1].bytes
assert_read(sys.argv[1], run, 2)
"""


def test_a_thread_makes_values_of_codes_as_a_writer_does(tmp_path: Path) -> None:
    program = [sys.executable, "-c", WITHOUT_MEMFD, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "a thread writes snapshots" in done.stderr
    assert lossy(tmp_path) == [2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_is_such_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(quantise, "DEVICES", {"cuda"})
    run = Run(dtype, "cuda")
    with fp8(tmp_path) as checkpointer:
        run.save(checkpointer, 1).wait(timeout_s=WAIT_S)
        for step in (2, 3):
            pending = run.save(checkpointer, step)
            run.step(1000)
            pending.wait(timeout_s=WAIT_S)
            assert pending.copied < pending.bytes
    for step in (2, 3):
        assert_read(tmp_path, run, step)
    chains.assert_sound(tmp_path)
