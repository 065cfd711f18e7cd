"""Incremental saves in trouble: slabs come back, and nothing builds on what may go away."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import chains
from tests.chains import assert_same, assert_sound, copied
from torch_ckpt import Checkpointer, SaveFailed, SnapshotTorn, WriterDied, load_generation
from torch_ckpt.generations.verify import verify
from torch_ckpt.manifest.commit import update_tags

BIG = 1 << 18
"""Elements of a float tensor that has blocks of its own."""


def test_a_held_slab_alone_skips_no_save(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None, on_busy="skip") as checkpointer:
        for step in (1, 2, 3):
            pending = checkpointer.save(state, step)
            assert pending.state != "skipped"
            pending.wait()
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        running = checkpointer.save(state, 4)
        skipped = checkpointer.save(state, 5)
        os.kill(checkpointer.writer_pid, signal.SIGCONT)
        assert skipped.state == "skipped"
        running.wait()
        checkpointer.save(state, 6).wait()
    assert chains.bases(tmp_path)[6] == (1,)


def test_saves_faster_than_storage_wait_their_turn(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    wanted = {}
    with Checkpointer(tmp_path, codec="zstd", incremental=True, keep=None) as checkpointer:
        for step in range(1, 13):
            state["w"] += 1e-5
            wanted[step] = copied(state)
            checkpointer.save(state, step)
    for step, tensors in wanted.items():
        assert_same(load_generation(tmp_path, step), tensors)


def test_a_discarded_save_is_no_base(tmp_path: Path) -> None:
    model = torch.nn.Linear(600, 600)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with Checkpointer(tmp_path, incremental=True, keep=None, fence="manual") as checkpointer:
        checkpointer.save(state, 1).wait()
        torn = checkpointer.save(state, 2)
        model.weight.data = torch.randn(600, 600)  # replaced before the fence
        with torch.no_grad():
            model.bias.add_(1)
        checkpointer.fence()
        with pytest.raises(SnapshotTorn):
            checkpointer.wait()
        assert torn.state == "failed"
        checkpointer.save(state, 3).wait()
        checkpointer.save(state, 4).wait()
    assert chains.bases(tmp_path) == {1: (), 3: (), 4: (3,)}
    found = load_generation(tmp_path)
    assert torch.equal(found["model"]["weight"], model.weight)


def test_after_a_save_that_failed_one_stands_alone(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        checkpointer.save(state, 1).wait()
        (tmp_path / "step-0000000002").touch()
        checkpointer.save(state, 2)
        with pytest.raises(SaveFailed):
            checkpointer.wait()
        for step in (3, 4):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait()
    assert chains.bases(tmp_path) == {1: (), 3: (), 4: (3,)}
    assert_same(load_generation(tmp_path), state)


def _removed(root: Path) -> None:
    for file in (root / "step-0000000001").iterdir():
        file.unlink()
    (root / "step-0000000001").rmdir()


def _quarantined(root: Path) -> None:
    update_tags(chains.store_at(root), "step-0000000001", add={"damaged": "a flipped bit"})


def _set_aside(root: Path) -> None:
    update_tags(chains.store_at(root), "step-0000000002", add={"aside": "went back"})


@pytest.mark.parametrize("spoil", [_removed, _quarantined, _set_aside])
def test_nothing_builds_on_what_went_bad_meanwhile(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    state = {"w": torch.randn(BIG), "frozen": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        for step in (1, 2):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait()
        spoil(tmp_path)
        for step in (3, 4):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait()
    assert {step: chains.bases(tmp_path)[step] for step in (3, 4)} == {3: (), 4: (3,)}
    assert_same(load_generation(tmp_path), state)


def test_a_killed_writer_gives_the_slab_back(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        step = 0
        for _ in range(3):
            for _ in range(2):
                step += 1
                state["w"] += 1e-5
                checkpointer.save(state, step).wait(timeout_s=60)
            assert checkpointer.writer_pid is not None
            os.kill(checkpointer.writer_pid, signal.SIGKILL)
            while checkpointer.writer_pid is not None:
                time.sleep(0.01)  # what is handed to a dead one is another test
    assert chains.bases(tmp_path) == {1: (), 2: (1,), 3: (), 4: (3,), 5: (), 6: (5,)}
    assert_same(load_generation(tmp_path), state)


def test_a_writer_killed_while_it_encodes_fails_one_save(tmp_path: Path) -> None:
    state = {"w": torch.randn(8 << 20)}
    with Checkpointer(tmp_path, codec="zstd", incremental=True, keep=None) as checkpointer:
        checkpointer.save(state, 1).wait()
        state["w"] += 1e-5
        pending = checkpointer.save(state, 2)
        assert checkpointer.writer_pid is not None
        time.sleep(0.01)
        os.kill(checkpointer.writer_pid, signal.SIGKILL)
        with contextlib.suppress(WriterDied):
            checkpointer.wait(timeout_s=60)
        assert pending.done
        for step in (3, 4):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait(timeout_s=60)
    assert {s: chains.bases(tmp_path)[s] for s in (3, 4)} == {3: (), 4: (3,)}
    assert_same(load_generation(tmp_path), state)
    assert_sound(tmp_path)


def test_a_stopped_writer_that_is_replaced_takes_no_slab_from_its_successor(
    tmp_path: Path,
) -> None:
    state = {"w": torch.randn(BIG)}
    wanted = {}
    with Checkpointer(tmp_path, incremental=True, keep=None, writer_timeout_s=2) as checkpointer:
        checkpointer.save(state, 1).wait()
        checkpointer.save(state, 2).wait()
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        checkpointer.save(state, 3)
        with pytest.raises(WriterDied):
            checkpointer.wait(timeout_s=60)
        for step in range(4, 9):
            state["w"] += 1e-5
            wanted[step] = copied(state)
            checkpointer.save(state, step).wait(timeout_s=60)
    for step, tensors in wanted.items():
        assert_same(load_generation(tmp_path, step), tensors)
    assert chains.bases(tmp_path)[8] == (4, 5, 6, 7)


def test_a_save_from_a_signal_handler_is_whole_and_replaces_no_base(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    inline = []
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state, step).wait()
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        writer = checkpointer.writer_pid
        pending = checkpointer.save(state, 3)

        def handler(*_: object) -> None:
            os.kill(writer, signal.SIGCONT)
            inline.append(checkpointer.save(state, 4, block="committed"))
            inline.append(checkpointer.save(state, 1, block="committed"))

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            checkpointer.wait(timeout_s=60)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert pending.state == "committed"
        checkpointer.save(state, 5).wait()
    store = chains.store_at(tmp_path)
    committed = chains.Catalog(store).committed()
    assert [one.step for one in committed] == [5, 4, 3, 2, 1, 1]
    for one in committed:
        assert verify(store, one).ok, one.folder
        assert_same(load_generation(tmp_path, folder=one.folder), state)


def test_a_step_that_is_saved_again_does_not_take_a_base_away(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        for step in (1, 2, 3):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait()
        newest = copied(state)
        state["w"].zero_()
        again = checkpointer.save(state, 2)
        again.wait()
    assert again.folder != "step-0000000002"
    assert_same(load_generation(tmp_path, folder=again.folder), state)
    assert_same(load_generation(tmp_path, 3), newest)


def test_going_back_leaves_the_bases_of_what_was_newer(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        for step in (1, 2, 3):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait()
    newest = copied(state)
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        assert checkpointer.resume(state, step=1) is not None
        for step in (1, 2, 3, 4):
            state["w"] += 1
            checkpointer.save(state, step).wait()
    assert_sound(tmp_path)
    assert_same(load_generation(tmp_path, folder="step-0000000003"), newest)
    assert_same(load_generation(tmp_path, 4), state)


def test_several_checkpointers_keep_their_bases_apart(tmp_path: Path) -> None:
    states = {name: {"w": torch.randn(BIG)} for name in "ab"}
    with (
        Checkpointer(tmp_path / "a", incremental=True, keep=None) as one,
        Checkpointer(tmp_path / "b", codec="zstd", incremental=True, keep=None) as other,
    ):
        for step in (1, 2, 3):
            for name, checkpointer in (("a", one), ("b", other)):
                states[name]["w"] += 1e-5
                checkpointer.save(states[name], step, block="committed")
    for name, state in states.items():
        assert chains.bases(tmp_path / name)[3] == (1, 2)
        assert_same(load_generation(tmp_path / name), state)


THREADED = """
import os, sys
del os.memfd_create
import torch
from torch_ckpt import Checkpointer, load_generation
with Checkpointer(sys.argv[1], codec="zstd", incremental=True, keep=None) as checkpointer:
    state = {"t": torch.randn(1 << 18)}
    assert checkpointer.resume(state) is None
    for step in range(1, 5):
        state["t"] += 1e-5
        checkpointer.save(state, step).wait()
    assert checkpointer.writer_pid is None
    state["more"] = torch.randn(1 << 22)
    for step in (5, 6):
        checkpointer.save(state, step).wait()
loaded = load_generation(sys.argv[1])
assert all(torch.equal(loaded[name], state[name]) for name in state)
"""


def test_a_writing_thread_builds_on_the_last_save_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADED, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert chains.bases(tmp_path) == {1: (), 2: (1,), 3: (1, 2), 4: (1, 2, 3), 5: (), 6: (5,)}
