"""What two ranks do whose generations build on one another, one of which fails in some saves.

Knows the public surface of the engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from torch_ckpt import Checkpointer
from torch_ckpt.errors import CkptError

STEPS = (1, 2, 3, 4, 5, 6, 7)
FAILS = {3: 1, 5: 0}
"""The rank whose writer is killed, by step."""
_SIZE = 1 << 18


def state_of(rank: int, step: int) -> dict[str, Any]:
    """What every rank has, replicated and its own, at a step."""
    return {
        "frozen": torch.arange(float(4 * _SIZE)),
        "slow": torch.linspace(-1, 1, 4 * _SIZE) + step * 1e-4,
        "step": step,
    }


def train(rank: int, root: str) -> None:
    """Save the steps; in some a rank's writer is killed before it has done its share."""
    with Checkpointer(root, incremental=True, codec="zstd", keep=None) as checkpointer:
        for step in STEPS:
            writer = checkpointer.writer_pid if FAILS.get(step) == rank else None
            if writer is not None:
                os.kill(writer, signal.SIGSTOP)
            pending = checkpointer.save(state_of(rank, step), step)
            if writer is not None:
                pending.wait("staged")
                os.kill(writer, signal.SIGKILL)
            with contextlib.suppress(CkptError):
                pending.wait(timeout_s=60)
            dist.barrier()
        with contextlib.suppress(CkptError):
            checkpointer.wait()


def tagged(rank: int, root: str) -> None:
    """Save four steps, the third of which rank 0 alone calls permanent."""
    with Checkpointer(root, incremental=True, keep=None) as checkpointer:
        for step in (1, 2, 3, 4):
            tags = ["permanent"] if (rank, step) == (0, 3) else []
            checkpointer.save(state_of(rank, step), step, tags=tags).wait()
            dist.barrier()


def go_on(rank: int, root: str, steps: tuple[int, ...]) -> tuple[int | None, bool]:
    """Resume, compare every bit, and save more steps."""
    state = state_of(rank, 0)
    with Checkpointer(root, incremental=True, codec="zstd", keep=None) as checkpointer:
        found = checkpointer.resume(state)
        for step in steps:
            checkpointer.save(state_of(rank, step), step).wait(timeout_s=60)
    if found is None:
        return None, False
    wanted = state_of(rank, found.step)
    return found.step, all(torch.equal(state[n], wanted[n]) for n in ("frozen", "slow"))


def resume(rank: int, root: str) -> tuple[int | None, bool]:
    """Resume and compare every bit."""
    state = state_of(rank, 0)
    with Checkpointer(root, incremental=True, codec="zstd", keep=None) as checkpointer:
        found = checkpointer.resume(state)
    if found is None:
        return None, False
    wanted = state_of(rank, found.step)
    same = all(torch.equal(state[n], wanted[n]) for n in ("frozen", "slow"))
    return found.step, same and state["step"] == found.step
