"""What trainers of these tests do: small real runs whose state at every step is known.

The state of a step is a pure function of the step, so that whoever resumes can tell a right byte
from a wrong one. Knows the public surface of the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.crash.run import Inside
from torch_ckpt import Checkpointer
from torch_ckpt.errors import CkptError
from torch_ckpt.generations.retention import KeepLast

torch.set_num_threads(1)

SMALL, LARGE = 2000, 20_000_000
"""Elements of the state's weight; the writer needs a while for the large one."""


def state_of(step: int, size: int = SMALL) -> dict[str, Any]:
    """The known state of a step.

    All of one dtype and so one block: the writer hashes and writes it with one thread of its
    pool, which makes the order of its system calls the same every time.
    """
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "weight": torch.randn(size, generator=generator),
            "bias": torch.randn(33, 7, generator=generator),
        },
        "more": [torch.arange(float(step), step + 50.0)],
        "step": step,
        "note": f"step {step}",
    }


def differences(found: dict[Any, Any], wanted: dict[Any, Any]) -> list[str]:
    """Keys whose values are not bit for bit the same."""
    odd = []
    for key, want in wanted.items():
        have = found.get(key)
        if isinstance(want, list):
            have, want = dict(enumerate(have or [])), dict(enumerate(want))
        if isinstance(want, dict):
            odd += [f"{key}.{name}" for name in differences(have or {}, want)]
        elif isinstance(want, torch.Tensor):
            if (
                not isinstance(have, torch.Tensor)
                or have.dtype != want.dtype
                or not torch.equal(have, want)
            ):
                odd.append(key)
        elif have != want or type(have) is not type(want):
            odd.append(key)
    return odd


def checkpointer(root: str, **options: Any) -> Checkpointer:
    """One that keeps a single generation, so that every save also prunes."""
    return Checkpointer(
        root, **{"keep": KeepLast(1), "distributed": False, "fence": "manual", **options}
    )


class Logged(logging.Handler):
    """Collects what the engine logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("torch_ckpt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def outcome(saver: Checkpointer, step: int, state: Any, **options: Any) -> dict[str, Any]:
    """Save a state, and say what became of it."""
    pending = saver.save(state, step, **options)
    error = None
    try:
        pending.wait("committed")
    except CkptError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return {"step": step, "state": pending.state, "error": error, "writer": saver.writer_pid}


def train_on_demand(inside: Inside, root: str, options: dict[str, Any]) -> None:
    """Save what the test asks for: a step, or a step and a folder's name; None ends the run."""
    log = Logged()
    prepare, named = options.pop("prepare", False), options.pop("named", False)
    saver = checkpointer(root, **options)
    if prepare:
        saver.prepare(state_of(0))
        inside.say({"writer": saver.writer_pid})
    states: dict[int, Any] = {}
    while (wish := inside.hear()) is not None:
        step, folder = wish if isinstance(wish, tuple) else (wish, None)
        if named and folder is None:
            folder = f"step-{step:010d}"  # only what was given a name can get a second one
        # Twice the same step is twice the same tensors: a second name for one snapshot.
        states = {step: states.get(step) or state_of(step)}
        inside.say({**outcome(saver, step, states[step], folder=folder), "log": log.lines[:]})
        log.lines.clear()
    try:
        saver.close()
    except CkptError as error:
        log.lines.append(str(error))


def stage(inside: Inside, root: str, how: str, options: dict[str, Any]) -> None:
    """Commit step 1 unless `how` is "first", have step 2 staged as `how` says, and say so."""
    saver = checkpointer(root, **options)
    if how != "first":
        saver.save(state_of(1), 1, block="committed")
    inside.say({"writer": saver.writer_pid, "children": forked_children(how)})
    inside.hear()
    state = state_of(2, LARGE if how == "large" else SMALL)
    if how == "fenced":
        weight = torch.nn.Parameter(state["model"]["weight"])
        state["model"]["weight"] = weight
        saver.save(state, 2, optimizers=[torch.optim.SGD([weight])]).wait("staged")
    elif how == "waited":
        saver.save(state, 2).wait("staged")
    else:
        saver.save(state, 2, block="staged")
    inside.say({"writer": saver.writer_pid})
    inside.hear()


def forked_children(how: str) -> list[int]:
    """Children that hold every descriptor of their parent and outlive it, as loaders' may."""
    children = []
    for _ in range(2 if how == "children" else 0):
        child = os.fork()
        if child == 0:
            time.sleep(600)  # the test ends it
            os._exit(0)
        children.append(child)
    return children


def save_after_looking(inside: Inside, root: str) -> None:
    """Look while nobody else is there; save when the test says so."""
    saver = checkpointer(root)
    assert saver.latest() is None
    inside.say({})
    inside.hear()
    inside.say(outcome(saver, 2, state_of(2)))


def die_copying(inside: Inside, root: str) -> None:
    """Commit step 1; die while the copy of step 2 goes on behind training."""
    saver = checkpointer(root)
    saver.save(state_of(1), 1, block="committed")
    weight = torch.nn.Parameter(torch.zeros(100_000_000))
    state = {**state_of(2), "model": {"weight": weight}}
    pending = saver.save(state, 2, optimizers=[torch.optim.SGD([weight])])
    inside.say({"writer": saver.writer_pid, "state": pending.state})
    os.kill(os.getpid(), signal.SIGKILL)


def close_at_once(inside: Inside, root: str, size: int, options: dict[str, Any]) -> None:
    """Close right after a save, and say how that went."""
    saver = checkpointer(root, **options)
    saver.save(state_of(1), 1, block="committed")
    inside.say({"writer": saver.writer_pid})
    inside.hear()
    pending = saver.save(state_of(2, size), 2) if size else None
    inside.say({})
    inside.hear()
    began = time.monotonic()
    error = None
    try:
        saver.close()
    except CkptError as failure:
        error = f"{type(failure).__name__}: {failure}"
    state = pending.state if pending is not None else None
    inside.say({"error": error, "state": state, "took_s": time.monotonic() - began})
    inside.hear()


def run_out_of_descriptors(inside: Inside, root: str) -> None:
    """Save while no descriptor is left, then while there are some again."""
    saver = checkpointer(root)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), limits[1]))
    starved = outcome(saver, 1, state_of(1))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    inside.say(starved)
    inside.say(outcome(saver, 2, state_of(2)))
    with contextlib.suppress(CkptError):
        saver.close()


def many_tensors(inside: Inside, root: str, count: int, descriptors: int) -> None:
    """Save and resume very many tensors with very few descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    state = {str(index): torch.full((3,), float(index)) for index in range(count)}
    with checkpointer(root) as saver:
        saver.save(state, 1, block="committed")
        saver.save(state, 2, block="committed")
        empty = {name: torch.zeros(3) for name in state}
        found = saver.resume(empty)
        assert found is not None
        wrong = [name for name, tensor in state.items() if not torch.equal(tensor, empty[name])]
        inside.say({"step": found.step, "wrong": wrong})


def small_tmpdir(inside: Inside, root: str, folder: str) -> None:
    """Save and resume with nearly no room for temporary files."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    with checkpointer(root) as saver:
        inside.say(outcome(saver, 1, state_of(1, LARGE)))


def train_large(inside: Inside, root: str) -> None:
    """Save three large states, the last one when the test says so."""
    saver = checkpointer(root)
    for step in (1, 2, 3):
        if step == 3:
            inside.hear()
        inside.say(outcome(saver, step, state_of(step, LARGE)))
    with contextlib.suppress(CkptError):
        saver.close()


def save_against_blocked_storage(inside: Inside, root: str, saves: int, size: int) -> None:
    """Save on and on while the writer does not move; tell the memory of both at times."""
    saver = checkpointer(root, on_busy="skip", writer_timeout_s=600)
    state = state_of(1, size)
    saver.save(state, 1, block="committed")
    saver.save(state_of(2, size), 2, block="committed")
    assert saver.writer_pid is not None
    inside.say({"writer": saver.writer_pid})
    inside.hear()
    states = []
    for step in range(3, saves + 3):
        state["model"]["weight"].add_(1)
        states.append(saver.save(state, step).state)
        if step in (12, saves + 2):
            used = sum(proportional_bytes(pid) for pid in (os.getpid(), saver.writer_pid))
            inside.say({"bytes": used, "skipped": states.count("skipped")})
    inside.hear()
    saver.wait()
    inside.say({"committed": [one.step for one in saver.generations()]})
    saver.close()


def proportional_bytes(pid: int) -> int:
    """Memory of a process, in which shared pages count in parts."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line[:4] == "Pss:")


def resume_once(inside: Inside, root: str, size: int, options: dict[str, Any]) -> None:
    """Resume, check every bit, and say what was found."""
    log = Logged()
    with checkpointer(root, **options) as saver:
        inside.say(resumed(saver, state_of(0, size), log))


def resumed(saver: Checkpointer, state: dict[str, Any], log: Logged) -> dict[str, Any]:
    """What `resume` did to a state."""
    try:
        found = saver.resume(state)
    except CkptError as error:
        return {"step": None, "error": f"{type(error).__name__}: {error}", "log": log.lines}
    if found is None:
        return {"step": None, "error": None, "log": log.lines, "writer": saver.writer_pid}
    size = int(state["model"]["weight"].numel())
    return {
        "step": found.step,
        "error": None,
        "differs": differences(state, state_of(found.step, size)),
        "log": log.lines,
        "writer": saver.writer_pid,
    }
