"""What two ranks do whose moments are copied as codes. Knows the public surface of the engine."""

from __future__ import annotations

import torch.distributed as dist

from tests.moments import Run, as_device
from torch_ckpt import Checkpointer

SHAPE = (2048, 1024)
"""Of each tensor every rank has a share of more than 1 MiB."""


def train(rank: int, root: str, steps: list[int], late: int) -> list[bool]:
    """Save the steps, each after the last one is committed; whether each was copied as codes.

    At step `late` rank 1 does not know that.
    """
    as_device()
    run, found = Run(shape=SHAPE), []
    with Checkpointer(root, moments="fp8", keep=None) as checkpointer:
        for step in steps:
            if step == late and rank == 1:
                checkpointer.remove("no-such-folder")
            pending = run.save(checkpointer, step)
            pending.wait(timeout_s=60)
            dist.barrier()
            found.append(pending.copied < pending.bytes)
    return found
