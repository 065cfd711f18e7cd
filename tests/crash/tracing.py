"""Crash points and I/O errors of a running process, forced from outside with strace.

`injection` attaches to one thread of a real process, so that the n-th call of that thread is the
one that is hit. Knows strace and /proc. Knows nothing of the engine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 30.0

CALLS = (
    "write,pwrite64,fsync,fdatasync,ftruncate,fallocate,rename,renameat,renameat2,"
    "link,linkat,symlink,unlink,unlinkat,mkdir,mkdirat,rmdir"
)
"""Every system call with which a save or a prune changes storage."""


@dataclass(frozen=True)
class Point:
    """The n-th call of one kind by one thread."""

    thread: int
    """Its place among the threads of the process, by age."""
    call: str
    nth: int

    def __str__(self) -> str:
        return f"thread{self.thread}-{self.call}-{self.nth}"


@functools.cache
def why_not() -> str | None:
    """Why crash points cannot be forced here; None if they can."""
    if shutil.which("strace") is None:
        return "strace is missing (apt-get install strace)"
    victim = subprocess.Popen(["sleep", "30"])
    try:
        with injection(victim.pid, "getpid", "retval=1"):
            return None
    except OSError as error:
        return f"strace may not attach to a process here: {error}"
    finally:
        victim.kill()
        victim.wait()


def threads(pid: int) -> list[int]:
    """The threads of a process, oldest first: numbers go up, and begin anew at some point."""
    numbers = int(Path("/proc/sys/kernel/pid_max").read_text())
    tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return sorted(tids, key=lambda tid: (tid - pid) % numbers)


@contextmanager
def attached(
    arguments: list[str], tids: list[int], also: list[int] | None = None
) -> Iterator[None]:
    """strace on some threads from now on; it lets go of those that live at the end.

    `also` are those that it attaches to by itself.

    Raises:
        OSError: it could not attach.
    """
    before = {tid: _switches(_status(tid)) for tid in {*tids, *(also or ())}}
    command = ["strace", "-qq", *arguments, *(x for tid in tids for x in ("-p", str(tid)))]
    tracer = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        _await_attached(tracer, before)
        yield
    finally:
        _let_go(tracer)


def _let_go(tracer: subprocess.Popen[bytes]) -> None:
    """Have strace detach; one interrupt can be lost between its look at it and its next wait."""
    deadline = time.monotonic() + PATIENCE_S
    while tracer.poll() is None and time.monotonic() < deadline:
        tracer.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            tracer.wait(0.1)
    tracer.kill()
    tracer.communicate()


def _await_attached(tracer: subprocess.Popen[bytes], before: dict[int, int]) -> None:
    """Wait until every thread has stopped for its tracer and was let go again.

    A thread has its tracer for a moment before the tracer sees its system calls.
    """
    deadline = time.monotonic() + PATIENCE_S
    waiting = set(before)
    while waiting:
        if tracer.poll() is not None or time.monotonic() > deadline:
            words = tracer.stderr.read() if tracer.stderr and tracer.poll() is not None else b""
            raise OSError(words.decode("utf-8", "replace").strip() or "it did not attach")
        for tid in list(waiting):
            status = _status(tid)
            traced = _field(status, "TracerPid") == str(tracer.pid)
            if traced and _switches(status) > before[tid] and _field(status, "State")[:1] != "t":
                waiting.discard(tid)
        time.sleep(0.002)


def _status(tid: int) -> str:
    try:
        return Path(f"/proc/{tid}/status").read_text()
    except OSError:
        return ""


def _field(status: str, name: str) -> str:
    found = re.search(rf"^{name}:\s*(.*)$", status, re.MULTILINE)
    return found[1] if found else ""


def _switches(status: str) -> int:
    return int(_field(status, "voluntary_ctxt_switches") or 0)


@contextmanager
def injection(tid: int, call: str, what: str, nth: int | str = 1) -> Iterator[None]:
    """Have the n-th `call` of a thread from now on end in `what`, an action of strace.

    "1+" is every call from the first one on.
    """
    with attached(_inject(call, what, nth), [tid]):
        yield


@contextmanager
def injection_everywhere(pid: int, call: str, what: str, nth: int | str = 1) -> Iterator[None]:
    """As `injection`, for the first thread of a process, old or new, that makes its n-th call."""
    with attached(["-f", *_inject(call, what, nth)], [pid], also=threads(pid)):
        yield


def _inject(call: str, what: str, nth: int | str) -> list[str]:
    inject = f"inject={call}:{what}:when={nth}"
    return ["-o", "/dev/null", "-e", f"trace={call}", "-e", inject]


@contextmanager
def recording(pid: int, out: Path, calls: str = CALLS) -> Iterator[list[Point]]:
    """Record the calls of a process; the list is filled with its points at the end."""
    tids = threads(pid)
    points: list[Point] = []
    with attached(["-y", "-o", str(out), "-f", "-e", f"trace={calls}"], tids):
        yield points
    counts: dict[tuple[int, str], int] = {}
    for line in out.read_text().splitlines():
        found = re.match(r"(\d+)\s+(\w+)\(", line)
        if found is None:
            continue
        if int(found[1]) not in tids:
            tids.append(int(found[1]))  # began meanwhile
        thread, call = tids.index(int(found[1])), found[2]
        counts[thread, call] = nth = counts.get((thread, call), 0) + 1
        points.append(Point(thread, call, nth))
