"""Ranks of which one has storage that does not get on for a while. Knows the public surface."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from torch_ckpt import Checkpointer

VICTIM = 1
AGREE_S = 8.0


def save_beside_a_stopped_writer(rank: int, root: str) -> dict[str, Any]:
    """Five saves; the writer of one rank is stopped from the second to the fourth."""
    state = {"weight": torch.ones(1000), "step": 0}
    states, blocked = [], []
    with Checkpointer(root, keep=None, agree_timeout_s=AGREE_S) as checkpointer:
        for step in range(1, 6):
            state["step"] = step
            if step == 2 and rank == VICTIM:
                assert checkpointer.writer_pid is not None
                os.kill(checkpointer.writer_pid, signal.SIGSTOP)
            began = time.monotonic()
            pending = checkpointer.save(state, step, block="staged")
            blocked.append(time.monotonic() - began)
            states.append(pending.state)
            if step == 4:
                if rank == VICTIM:
                    os.kill(checkpointer.writer_pid or 0, signal.SIGCONT)
                checkpointer.wait()
                dist.barrier()
            elif step == 1:
                pending.wait()
        checkpointer.wait()
        dist.barrier()
        steps = [one.step for one in checkpointer.generations()]
    return {"skipped": states[3], "blocked": blocked[3], "steps": steps}
