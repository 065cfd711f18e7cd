"""What two ranks do that store moments with a loss, one of which is late once.

Knows the public surface of the engine.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from torch_ckpt import Checkpointer

STEPS = range(1, 12)
_STOPPED, _LATE = 3, 5
_SIZE = 1 << 19
_STOP_S = 0.5


def state_of(step: int) -> dict[str, Any]:
    """Two moments, so that each rank stores one."""
    made = torch.Generator().manual_seed(step)
    return {name: {"exp_avg": torch.randn(_SIZE, generator=made)} for name in ("a", "b")}


def train(rank: int, root: str) -> None:
    """Save the steps; two slabs of rank 1 are taken when step 5 wants one."""
    with Checkpointer(root, moments="fp8", keep=None, full_every=4) as checkpointer:
        for step in STEPS:
            if rank == 1 and step == _STOPPED and (writer := checkpointer.writer_pid) is not None:
                os.kill(writer, signal.SIGSTOP)
                threading.Timer(_STOP_S, os.kill, (writer, signal.SIGCONT)).start()
            pending = checkpointer.save(state_of(step), step)
            if not _STOPPED <= step < _LATE:
                pending.wait(timeout_s=60)
                dist.barrier()
