"""What the ranks of `test_votes` do: fail a save in every way, then look at what is left.

All return plain values for the tests to judge. Knows the public surface of the engine, processes
and strace.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.crash.tracing import injection_everywhere
from torch_ckpt import Checkpointer, CkptError, PerRank
from torch_ckpt import save as save_module
from torch_ckpt.pending import PendingSave

VICTIM = 1
_LARGE = 60_000_000
"""Elements whose copy takes long enough to be interrupted."""


def state_of(rank: int, step: int, own: Any = None) -> dict[str, Any]:
    """Replicated tensors that are spread over the ranks, and what is each rank's own."""
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": [torch.randn(1 << 19, generator=generator) for _ in range(3)],
        "step": step,
        "mine": PerRank({"t": torch.full((5,), float(10 * step + rank))} if own is None else own),
    }


def slow_to_copy(rank: int, step: int) -> tuple[dict[str, Any], list[torch.optim.Optimizer]]:
    """A state of which one rank copies for a while behind training, and who owns that."""
    if rank != VICTIM:
        return state_of(rank, step), []
    weight = torch.nn.Parameter(torch.zeros(_LARGE))
    state = state_of(rank, step, {"t": torch.zeros(5), "large": weight})
    return state, [torch.optim.SGD([weight])]


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether two states are equal bit for bit."""
    pairs = zip(found["weights"], wanted["weights"], strict=True)
    return (
        found["step"] == wanted["step"]
        and all(torch.equal(a, b) for a, b in pairs)
        and torch.equal(found["mine"].value["t"], wanted["mine"].value["t"])
    )


def files(root: str) -> list[str]:
    """Everything under a root, without the attempts and random parts of names."""
    paths = [path for path in Path(root).rglob("*") if path.is_dir() or path.name != "LATEST"]
    return sorted(
        f"{path.parent.name}/{path.name.split('.')[0]}{path.suffix}"
        if path.is_file()
        else path.name
        for path in paths
    )


def writer_of(checkpointer: Checkpointer) -> int:
    pid = checkpointer.writer_pid
    assert pid is not None
    return pid


def outcome(pending: PendingSave) -> str | None:
    """What `wait` raises; None if the save went well as far as this rank can tell."""
    try:
        pending.wait()
    except CkptError as error:
        return str(error)
    return None


# Ways to fail, each for the whole of one save.


@contextmanager
def _no_space(checkpointer: Checkpointer, call: str, nth: int | str) -> Iterator[None]:
    with injection_everywhere(writer_of(checkpointer), call, "error=ENOSPC", nth):
        yield


@contextmanager
def _killed(checkpointer: Checkpointer, call: str, nth: int) -> Iterator[None]:
    with injection_everywhere(writer_of(checkpointer), call, "signal=KILL", nth):
        yield


@contextmanager
def _killed_while_stopped(checkpointer: Checkpointer) -> Iterator[None]:
    """So that nothing of the save is certainly written."""
    victim = writer_of(checkpointer)
    os.kill(victim, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(victim, signal.SIGKILL)


Failure = Callable[[Checkpointer], contextlib.AbstractContextManager[None]]

PROMPT: dict[str, tuple[tuple[int, ...], Failure]] = {
    "ENOSPC on the shard": ((VICTIM,), lambda c: _no_space(c, "pwrite64", 1)),
    "ENOSPC on the part": ((VICTIM,), lambda c: _no_space(c, "write", 1)),
    "a writer killed": ((VICTIM,), _killed_while_stopped),
    "the coordinator's writer killed before the manifest": ((0,), lambda c: _killed(c, "write", 2)),
    "all writers killed": ((0, 1, 2), _killed_while_stopped),
}
"""Failures that nobody needs to wait long for: who fails, and how."""


def fail_promptly(rank: int, root: str) -> dict[str, dict[str, Any]]:
    """Try every one of them, each followed by a save that works."""
    found = {}
    checkpointer = Checkpointer(root, keep=None, commit_timeout_s=100)
    checkpointer.save(state_of(rank, 0), 0, block="committed")
    dist.barrier()
    for number, (how, (victims, failure)) in enumerate(PROMPT.items()):
        failing = failure(checkpointer) if rank in victims else contextlib.nullcontext()
        step = 2 * number + 1
        began = time.monotonic()
        if failure is _killed_while_stopped:
            with failing:
                pending = checkpointer.save(state_of(rank, step), step, block="staged")
            error = outcome(pending)
        else:
            with failing:
                dist.barrier()  # strace needs a while to attach
                began = time.monotonic()
                pending = checkpointer.save(state_of(rank, step), step)
                error = outcome(pending)
        took_s = time.monotonic() - began
        dist.barrier()
        found[how] = {"error": error, "took_s": took_s, **_go_on(checkpointer, rank, step, root)}
    with contextlib.suppress(CkptError):
        checkpointer.close()
    return found


def _go_on(checkpointer: Checkpointer, rank: int, step: int, root: str) -> dict[str, Any]:
    """After a failed save: what is loaded, and how the next save goes."""
    left = files(root) if rank == 0 else []
    loaded = state_of(9, 0)
    generation = checkpointer.load(loaded)
    stands = generation.step == step - 1 and same(loaded, state_of(rank, step - 1))
    following = checkpointer.save(state_of(rank, step + 1), step + 1)
    error, told = outcome(following), None
    dist.barrier()  # rank 0 has committed
    try:
        checkpointer.wait()
    except CkptError as failure:
        told = str(failure)
    failed = f"step-{step:010d}"
    return {
        "stands": stands,
        "next": error,
        "told": told,
        "left": [name for name in left if failed in name],
        "left after the next": [name for name in files(root) if failed in name],
    }


SILENT = ("a stopped writer", "a stopped trainer", "a disk without room for a note")


def fail_silently(rank: int, root: str, commit_timeout_s: float) -> dict[str, dict[str, Any]]:
    """Failures that only the time-out ends."""
    found = {}
    checkpointer = Checkpointer(root, keep=None, commit_timeout_s=commit_timeout_s)
    checkpointer.save(state_of(rank, 0), 0, block="committed")
    dist.barrier()
    for number, how in enumerate(SILENT):
        step, victim = 2 * number + 1, rank == VICTIM
        state, optimizers = state_of(rank, step), []
        failing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if victim and how == SILENT[0]:
            os.kill(writer_of(checkpointer), signal.SIGSTOP)
        elif how == SILENT[1]:
            state, optimizers = slow_to_copy(rank, step)
        elif victim:
            failing = _no_space(checkpointer, "write", "1+")
        with failing:
            dist.barrier()
            began = time.monotonic()
            pending = checkpointer.save(state, step, optimizers=optimizers)
            if victim and how == SILENT[1]:
                assert pending.state == "copying"
                stop_for(2 * commit_timeout_s)
            error = outcome(pending) if not victim or how != SILENT[0] else None
            took_s = time.monotonic() - began
            dist.barrier()
        if victim and how == SILENT[0]:
            os.kill(writer_of(checkpointer), signal.SIGCONT)
        found[how] = {"error": error, "took_s": took_s, **_go_on(checkpointer, rank, step, root)}
    with contextlib.suppress(CkptError):
        checkpointer.close()
    return found


def stop_for(seconds: float) -> None:
    """Stop this whole process; a shell wakes it."""
    waker = subprocess.Popen(["sh", "-c", f"sleep {seconds:g}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


def die(rank: int, root: str, how: str) -> None:
    """Commit step 1, then die during step 2 or after it was staged."""
    checkpointer = Checkpointer(root, keep=None)
    checkpointer.save(state_of(rank, 1), 1, block="committed")
    dist.barrier()
    state, optimizers = state_of(rank, 2), []
    if how != "all staged":
        state, optimizers = slow_to_copy(rank, 2)
    pending = checkpointer.save(state, 2, optimizers=optimizers)
    if optimizers:
        die_copying(checkpointer, pending)
    pending.wait("staged")
    with contextlib.suppress(Exception):  # the others may be dead already
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def die_writing(rank: int, root: str, note: str) -> None:
    """Commit step 1, then die with step 2 staged, while one rank's writer is stopped."""
    checkpointer = Checkpointer(root, keep=None, commit_timeout_s=3600)
    checkpointer.save(state_of(rank, 1), 1, block="committed")
    dist.barrier()
    if rank == VICTIM:
        Path(note).write_text(str(writer_of(checkpointer)))
        os.kill(writer_of(checkpointer), signal.SIGSTOP)
    dist.barrier()
    checkpointer.save(state_of(rank, 2), 2, block="staged")
    with contextlib.suppress(Exception):
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resume_late(rank: int, root: str, orphan_timeout_s: float) -> str | tuple[int, bool]:
    """Resume what may still be written, with a short time-out of the ranks for one another."""
    state = state_of(9, 0)
    with Checkpointer(
        root, keep=None, agree_timeout_s=4, orphan_timeout_s=orphan_timeout_s
    ) as checkpointer:
        try:
            generation = checkpointer.resume(state)
        except CkptError as error:
            return f"{type(error).__name__}: {error}"
    assert generation is not None
    return generation.step, same(state, state_of(rank, generation.step))


def die_copying(checkpointer: Checkpointer, pending: PendingSave) -> None:
    """Kill the writer and this process before the snapshot is whole."""
    assert pending.state == "copying"
    os.kill(writer_of(checkpointer), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def survive(rank: int, root: str) -> dict[str, Any]:
    """As `die`, for the peers that go on: what they hear, and how `close` goes."""
    checkpointer = Checkpointer(root, keep=None, commit_timeout_s=100, agree_timeout_s=20)
    checkpointer.save(state_of(rank, 1), 1, block="committed")
    dist.barrier()
    state, optimizers = slow_to_copy(rank, 2)
    pending = checkpointer.save(state, 2, optimizers=optimizers)
    if optimizers:
        die_copying(checkpointer, pending)
    began = time.monotonic()
    found: dict[str, Any] = {"error": outcome(pending), "took_s": time.monotonic() - began}
    try:
        checkpointer.save(state_of(rank, 3), 3)
    except CkptError as error:
        found["next"] = type(error).__name__
    with contextlib.suppress(CkptError):
        checkpointer.close()
    return found


def resume_all(rank: int, roots: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Resume every root, check every bit, and save on."""
    found = {}
    for how, root in roots.items():
        began = time.monotonic()
        state = state_of(9, 0)
        with Checkpointer(root, keep=None, commit_timeout_s=60) as checkpointer:
            generation = checkpointer.resume(state)
            assert generation is not None
            step, took_s = generation.step, time.monotonic() - began
            equal = same(state, state_of(rank, step))
            pending = checkpointer.save(state_of(rank, 5), 5)
            pending.wait()
            dist.barrier()
        found[how] = {
            "step": step,
            "same": equal,
            "took_s": took_s,
            "next": pending.state,
            "files": files(root),
        }
    return found


def spell(rank: int, folder: str) -> dict[str, Any]:
    """One root in several spellings, with clocks that differ and go back; then a wrong root."""
    os.chdir(folder)
    root = ("run", f"{folder}/other/../run/", f"{folder}/link")[rank]
    with Checkpointer(root, keep=None, commit_timeout_s=30) as checkpointer:
        for step in (1, 2):
            set_clock(timedelta(days=-rank - 10 * step))
            checkpointer.save(state_of(rank, step), step, block="committed")
    dist.barrier()
    found: dict[str, Any] = {}
    state = state_of(9, 0)
    with Checkpointer(root, keep=None) as checkpointer:
        generation = checkpointer.resume(state)
        assert generation is not None
        found["resumed"] = (generation.step, same(state, state_of(rank, generation.step)))
    if rank == 2:
        root = f"{folder}/elsewhere"
    checkpointer = Checkpointer(root, keep=None, commit_timeout_s=3)
    found["wrong"] = [outcome(checkpointer.save(state_of(rank, step), step)) for step in (3, 4)]
    try:
        checkpointer.close()
    except CkptError as error:
        found["told"] = str(error)
    return found


def set_clock(shift: timedelta) -> None:
    """Let the engine see another time of day."""

    class Skewed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + shift

    save_module.datetime = Skewed
