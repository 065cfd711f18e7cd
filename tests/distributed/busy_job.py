"""Training whose own collectives are always under way while it saves.

Knows torch.distributed and the public surface of the engine.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed import sharded_job
from torch_ckpt import Checkpointer, KeepLast


def _sums(group: Any, count: int, odd: list[str]) -> None:
    """Collectives of a thread of the user's, on a group of its own."""
    for number in range(count):
        mine = torch.full((100,), float(number + dist.get_rank()))
        dist.all_reduce(mine, group=group)
        if mine[0].item() != 2 * number + 1:
            odd.append(f"thread {number}: {mine[0].item()}")


def save_often(rank: int, root: str, count: int) -> dict[str, Any]:
    """Two ranks; every save begins and ends between collectives that it must not meet."""
    threads_group, own = dist.new_group([0, 1]), dist.new_group([0, 1])
    odd: list[str] = []
    thread = threading.Thread(target=_sums, args=(threads_group, 10 * count, odd))
    thread.start()
    model, optimizer = sharded_job.build("fsdp")
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with Checkpointer(root, keep=KeepLast(2)) as checkpointer:
        for step in range(count):
            sent = torch.full((1000,), float(step + rank))
            other = torch.full((10,), float(step * rank))
            works = [dist.all_reduce(sent, async_op=True)]
            works.append(dist.all_reduce(other, group=own, async_op=True))
            state["step"] = step
            checkpointer.save(state, step)
            last = torch.full((10,), float(step))
            works.append(dist.broadcast(last, 0, async_op=True))
            if step % 10 == 0:
                sharded_job.train(model, optimizer, 1)
            for work in works:
                work.wait()
            if (sent[0].item(), other[0].item(), last[0].item()) != (2 * step + 1, step, step):
                odd.append(f"step {step}: {sent[0]} {other[0]} {last[0]}")
        checkpointer.wait()
        dist.barrier()
        steps = [one.step for one in checkpointer.generations()]
    thread.join()
    return {"odd": odd, "steps": steps}
