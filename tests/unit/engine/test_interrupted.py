"""Signals, closed objects, forks and threads that do not start: nothing hangs, nothing tears."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt import Checkpointer, KeepLast, SaveFailed, load_generation


def _large() -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.ones(64 << 20))
    return {"parameter": parameter, "optimizer": torch.optim.SGD([parameter], lr=0.1)}


@contextmanager
def _on_alarm(handler: Callable[[], object], after_s: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_of_the_fence_leaves_the_save_to_the_next_call(tmp_path: Path) -> None:
    state = _large()
    with Checkpointer(tmp_path) as checkpointer:
        pending = checkpointer.save(state, 1)
        with _on_alarm(_interrupt, 0.005), pytest.raises(KeyboardInterrupt):
            while True:
                checkpointer.fence()
        checkpointer.wait(timeout_s=60)
        assert pending.state == "committed"


def test_a_handler_may_save_and_wait_while_the_fence_waits(tmp_path: Path) -> None:
    state = _large()
    done = threading.Event()
    with Checkpointer(tmp_path) as checkpointer:

        def handler() -> None:
            checkpointer.save(state, 1, block="committed")
            checkpointer.wait(timeout_s=60)
            done.set()

        pending = checkpointer.save(state, 1)
        with _on_alarm(handler, 0.005):
            while not done.is_set():
                checkpointer.fence()
        pending.wait(timeout_s=60)
    for generation in checkpointer.generations():
        assert load_generation(tmp_path, folder=generation.folder)["parameter"].eq(1).all()


def test_a_handlers_save_of_a_step_under_way_costs_neither(tmp_path: Path) -> None:
    state = {"t": torch.rand(1 << 20)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, 1, block="committed")
        writer = checkpointer.writer_pid
        assert writer is not None
        os.kill(writer, signal.SIGSTOP)
        pending = checkpointer.save(state, 2)
        inline = []

        def handler() -> None:
            os.kill(writer, signal.SIGCONT)
            inline.append(checkpointer.save(state, 2, block="committed"))

        with _on_alarm(handler, 0.2):
            checkpointer.wait(timeout_s=60)
        assert pending.state == "committed"
    assert inline[0].folder != pending.folder
    for folder in (inline[0].folder, pending.folder):
        assert torch.equal(load_generation(tmp_path, folder=folder)["t"], state["t"])


def test_a_copy_thread_that_cannot_start_fails_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = torch.nn.Parameter(torch.ones(10))
    state = {"p": parameter, "optimizer": torch.optim.SGD([parameter], lr=0.1)}
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "ckpt-copy":
            raise RuntimeError("can't start new thread")
        real(thread)

    with Checkpointer(tmp_path, slabs=1) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            assert checkpointer.save(state, 1).state == "failed"
        checkpointer.save(state, 2).wait()
        with pytest.raises(SaveFailed, match="can't start new thread"):
            checkpointer.wait()


def test_a_forked_child_may_train(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"p": parameter, "optimizer": optimizer}, 1)
        child = os.fork()
        if child == 0:
            try:
                parameter.grad = torch.ones(10)
                optimizer.step()
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_fork_after_a_writer_died_closes_nothing_of_others(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"t": torch.ones(10)}, 1, block="committed")
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGKILL)
        while checkpointer.writer_pid is not None:
            time.sleep(0.05)
        time.sleep(0.2)
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
        child = os.fork()
        if child == 0:
            try:
                for other in others:
                    os.fstat(other)
                os._exit(0)
            except OSError:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        for other in others:
            os.close(other)


def test_a_save_can_be_waited_for_after_the_end(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=KeepLast(1)) as checkpointer:
        first = checkpointer.save({"t": torch.ones(10)}, 1)
        second = checkpointer.save({"t": torch.ones(10)}, 2)
    assert first.wait() is None, "it has been pruned"
    generation = second.wait()
    assert generation is not None
    assert generation.step == 2
