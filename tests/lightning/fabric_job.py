"""A Fabric loop under any strategy, to be killed and to go on, here or on other ranks.

Runs where `tests.lightning.job` starts it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_ckpt import attach
from tests.distributed.sharded_job import whole


class Net(nn.Module):
    """A layer of one row, dropout, and a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 14), nn.Dropout(0.3), nn.Linear(14, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.down(self.drop(torch.relu(self.up(x))))


def parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """FSDP2 over one dimension of the mesh, tensor parallelism over the other."""
    if mesh["tensor_parallel"].size() > 1:
        plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tensor_parallel"], plan)
    if mesh["data_parallel"].size() > 1 or mesh["tensor_parallel"].size() == 1:
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


def main(job: dict[str, Any]) -> None:
    """Train as told; every rank writes what came out of it."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    strategy = job["mesh"]
    if not isinstance(strategy, str):
        strategy = ModelParallelStrategy(parallel, strategy[0], strategy[1])
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    torch.manual_seed(job.get("seed", 0) + (rank if job["mesh"] == "ddp" else 0))
    model = fabric.setup_module(Net())
    plain = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer: Any = fabric.setup_optimizers(plain)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 3, 0.9)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4))
    state: dict[str, Any] = {
        "nets": [{"net": model, "name": "first"}],
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": 0,
        "losses": {"seen": []},
    }
    losses, began = [], {}
    batches = list(loader)  # before resuming: making an iterator draws a random number
    with attach(fabric, job["root"], keep=None) as checkpoints:
        generation = checkpoints.resume(state)
        if generation is not None:
            began = states(model, optimizer)
        while state["step"] < job["until"]:
            if state["step"] == job.get("kill_at"):
                checkpoints.wait()
                if dist.is_initialized():
                    dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            batch = batches[state["step"] % len(batches)]
            loss = (model(batch[0]) - batch[1]).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state["step"] += 1
            losses.append(loss.item())
            if state["step"] % 2 == 0:
                checkpoints.save(state["step"], state)
    result = {
        "from": generation.step if generation else None,
        "began": began,
        "state": states(model, optimizer),
        "scheduler": scheduler.state_dict(),
        "name": state["nets"][0]["name"],
        "losses": losses,
        "rng": torch.get_rng_state(),
    }
    torch.save(result, Path(f"{job['out']}.{rank}"))


def states(model: Any, optimizer: Any) -> dict[str, Any]:
    """The states of a model and its optimizer, put together from all ranks."""
    return {"model": whole(model.state_dict()), "optimizer": whole(optimizer.state_dict())}
