"""FSDP2 jobs of which one rank is killed or stopped at some stage of a save, and who resumes them.

Knows signals and the public surface of the engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.sharded_job import build, equal, train, whole
from tests.distributed.votes_programs import stop_for, writer_of
from torch_ckpt import Checkpointer, CkptError

STAGES = ("before staging", "while copying", "while writing", "before the manifest")


def _truth(model: Any, optimizer: Any) -> dict[str, Any]:
    return whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def save_and_fail(
    rank: int, root: str, timeout_s: float, victim: int | None, stage: str, stops: bool
) -> str:
    """Commit step 1; during step 2 one rank, or all of them, are killed or stopped."""
    model, optimizer = build("fsdp")
    dist.barrier()  # what a rank needed to get here does not count
    checkpointer = Checkpointer(
        root, keep=None, commit_timeout_s=timeout_s, agree_timeout_s=timeout_s
    )
    for step in (1, 2):
        train(model, optimizer, step)
        if rank == 0:
            Path(root).mkdir(exist_ok=True)
        truth = _truth(model, optimizer)
        if rank == 0:
            torch.save(truth, f"{root}/{step}.pt")
        if step == 1:
            state = {"model": model, "optimizer": optimizer}
            checkpointer.save(state, 1, block="committed")
            dist.barrier()
    mine = victim in (None, rank)
    writer = writer_of(checkpointer)
    if mine and stage == STAGES[0]:
        _end(stops, timeout_s)
    if stage == STAGES[3] and rank == 0:
        os.kill(writer, signal.SIGSTOP)  # parts come, the manifest does not
    heard = ""
    with contextlib.suppress(CkptError):
        pending = checkpointer.save(
            {"model": model, "optimizer": optimizer},
            2,
            block="copied" if stage == STAGES[1] else "staged",
        )
        if mine and stage == STAGES[3] and rank != 0:
            pending.wait()
        if mine and stage in STAGES[2:] and not stops:
            os.kill(writer, signal.SIGKILL)
        if mine and stops:
            stop_for(2 * timeout_s)  # by then the others have given up
            if stage == STAGES[3] and rank == 0:
                os.kill(writer, signal.SIGCONT)  # a stopped one would be waited for in vain
        if mine:
            _end(False, timeout_s)
    if stage == STAGES[3] and rank == 0:
        os.kill(writer, signal.SIGCONT)
    for call in (checkpointer.wait, checkpointer.close):
        try:
            call()
        except CkptError as error:
            heard = str(error)
    return heard


def _end(stops: bool, timeout_s: float) -> None:
    if stops:
        stop_for(2 * timeout_s)  # by then the others have given up
    os.kill(os.getpid(), signal.SIGKILL)


def resume_all(rank: int, roots: list[str], how: str) -> list[dict[str, Any]]:
    """Resume each root under this world's sharding, compare every bit, and save on."""
    found = []
    for root in roots:
        model, optimizer = build(how)
        with Checkpointer(root, keep=None, commit_timeout_s=60) as checkpointer:
            generation = checkpointer.resume({"model": model, "optimizer": optimizer})
            assert generation is not None
            step = generation.step
            odd = equal(torch.load(f"{root}/{step}.pt"), _truth(model, optimizer))
            odd += [] if step in (1, 2) else [f"step {step}"]
            checkpointer.save({"model": model, "optimizer": optimizer}, step, block="committed")
            if dist.is_initialized():
                dist.barrier()
            tags = [one.tags for one in checkpointer.generations() if one.set_apart]
        found.append({"step": step, "differs": odd, "set apart": tags})
    return found
