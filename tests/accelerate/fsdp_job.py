"""A job whose model is sharded with FSDP2 under Accelerate, on CPUs; run by `tests.accelerate.job`.

On CPUs Accelerate turns FSDP2 into plain DDP. `sharded` forces it in the states that Accelerators
share, which serves these tests and is nothing to do elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from accelerate_ckpt import CheckpointPlugin, attach
from tests.distributed.sharded_job import whole

BATCHES = 12


class Net(nn.Module):
    """Rows that do not divide evenly, dropout, and a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 13), nn.LayerNorm(13)
        self.drop, self.down = nn.Dropout(0.3), nn.Linear(13, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.down(self.drop(torch.relu(self.norm(self.up(x))))).squeeze(-1)


def sharded(job: dict[str, Any]) -> Accelerator:
    """An Accelerator of FSDP2, whatever the devices."""
    accumulation = GradientAccumulationPlugin(
        num_steps=job.get("accumulate", 1), sync_each_batch=job.get("sync_each_batch", False)
    )
    made = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=accumulation,
        project_config=ProjectConfiguration(job["folder"], automatic_checkpoint_naming=True),
    )
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False
    )
    for shared in (AcceleratorState._shared_state, PartialState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return made


def main(job: dict[str, Any]) -> None:
    """Train on twelve batches, or on the rest of them, saving and ending after those told."""
    torch.set_num_threads(1)
    accelerator = sharded(job)
    checkpoints = attach(accelerator, CheckpointPlugin(job["root"], **job.get("plugin", {})))
    torch.manual_seed(job.get("seed", 0) + accelerator.process_index)
    with torch.random.fork_rng():
        torch.manual_seed(1)  # Accelerate shards what each rank has made; it must be the same
        net, x = Net(), torch.randn(BATCHES * 8, 6)
    data = DataLoader(TensorDataset(x, x.sum(1)), 4, shuffle=True)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    net, optimizer, data, scheduler = accelerator.prepare(net, optimizer, data, scheduler)
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    position = checkpoints.resume()
    began = 0 if position is None else position.batch
    print(json.dumps({"what": "start", "at": began}), flush=True)
    losses = []
    batches = accelerator.skip_first_batches(data, began) if began else data
    for batch, (x, y) in enumerate(batches, began + 1):
        with accelerator.accumulate(net):
            loss = (net(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if batch in job.get("save_at", ()):
            accelerator.save_state()
        if batch == job.get("kill_at"):
            checkpoints.wait()
            accelerator.wait_for_everyone()
            os.kill(os.getpid(), signal.SIGKILL)
    state = whole([net.state_dict(), optimizer.optimizer.state_dict()])
    checkpoints.close()
    if "out" in job:
        text = json.dumps({"losses": losses, "state": digest(state)})
        Path(f"{job['out']}.{accelerator.process_index}").write_text(text)


def digest(state: Any) -> str:
    """Of every number in nested containers, in order."""
    found = hashlib.sha256()
    waiting = [state]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        else:
            found.update(
                one.numpy().tobytes() if isinstance(one, torch.Tensor) else repr(one).encode()
            )
    return found.hexdigest()
