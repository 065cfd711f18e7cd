"""Real trainers in processes of their own, started cheaply, watched, and ended by pid.

Trainers are forked from a server that has imported torch and done nothing else, so that each is a
fresh process in some tens of milliseconds. What a trainer runs is a function of `programs`.
Knows processes. Knows nothing of the engine.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 60.0
"""How long anything here may take on a loaded machine before it counts as hanging."""

Program = Callable[..., None]


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.crash.programs"])
    return context


class Trainer:
    """One process that runs a program; the program reports through `say`, waits through `hear`."""

    def __init__(self, program: Program, *args: Any) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._link: Connection = ours
        self._process = _context().Process(target=_enter, args=(theirs, program, args))
        self._process.start()
        theirs.close()
        self.writers: set[int] = set()
        self.children: set[int] = set()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def hear(self, timeout_s: float = PATIENCE_S) -> Any:
        """The next thing that the program says; its error, if it ended with one."""
        if not self._link.poll(timeout_s):
            raise TimeoutError(f"process {self.pid} said nothing for {timeout_s:g} s")
        kind, value = self._link.recv()
        if kind == "error":
            raise AssertionError(f"the trainer failed: {value}")
        return value

    def hear_dict(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """As `hear`, for a dict; a writer's pid in it is remembered."""
        said = self.hear(timeout_s)
        assert isinstance(said, dict), said
        if said.get("writer"):
            self.writers.add(said["writer"])
        self.children.update(said.get("children", ()))
        return said

    def say(self, value: Any = None) -> None:
        """Let the program go on."""
        self._link.send(value)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the trainer alone."""
        os.kill(self.pid, number)

    def join(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end; the exit code."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"process {self.pid} did not end within {timeout_s:g} s"
        return code

    def finish(self) -> None:
        """Wait for a good end."""
        with contextlib.suppress(OSError):  # it may have ended already
            self._link.send(None)
        code = self.join()
        with contextlib.suppress(EOFError, OSError):
            while self._link.poll():
                self.hear()  # raises what it failed with
        assert code == 0, code

    def end(self) -> None:
        """End the trainer and its writers, whatever state they are in."""
        for pid in self.writers:
            with contextlib.suppress(ProcessLookupError):
                if _is_writer(pid):
                    os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process.exitcode is None:
            self._process.kill()
        self._process.join(PATIENCE_S)
        self._link.close()
        for pid in self.writers:
            await_end(pid)


def _is_writer(pid: int) -> bool:
    """A pid that is remembered may belong to someone else by now."""
    try:
        return b"torch_ckpt.writer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def await_end(pid: int, timeout_s: float = PATIENCE_S) -> None:
    """Return once a process that is no child of ours is gone."""
    deadline = time.monotonic() + timeout_s
    while _is_writer(pid):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.Error:
            return
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


class Inside:
    """What a program has of the test that runs it."""

    def __init__(self, link: Connection) -> None:
        self._link = link

    def say(self, value: Any) -> None:
        """Report."""
        self._link.send(("said", value))

    def hear(self) -> Any:
        """Wait for the test."""
        return self._link.recv()


def _enter(link: Connection, program: Program, args: tuple[Any, ...]) -> None:
    try:
        program(Inside(link), *args)
    except BaseException as error:
        with contextlib.suppress(OSError):
            link.send(("error", f"{type(error).__name__}: {error}"))
        raise
