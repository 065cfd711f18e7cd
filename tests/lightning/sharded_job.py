"""A job under a model-parallel strategy, to be killed and to go on, here or on other ranks.

Runs where `tests.lightning.job` starts it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_ckpt import CheckpointCallback, TwoBufferCheckpointIO
from lightning_ckpt.strategy import local_of, own_states
from tests.distributed.sharded_job import whole
from tests.lightning.job import Script, loader, trainer_for

warnings.filterwarnings("ignore")


class Sharded(pl.LightningModule):
    """Layers whose rows do not divide evenly, dropout, and a buffer that every forward changes."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 13), nn.LayerNorm(13)
        self.drop, self.down = nn.Dropout(dropout), nn.Linear(13, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.losses: list[float] = []
        self.copied: list[str] = []

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None:
            return  # not a model-parallel strategy
        if mesh["tensor_parallel"].size() > 1:
            plan: Any = {
                "up": ColwiseParallel(output_layouts=Replicate()),
                "down": RowwiseParallel(input_layouts=Replicate()),
            }
            parallelize_module(self, mesh["tensor_parallel"], plan)
        if mesh["data_parallel"].size() > 1 or mesh["tensor_parallel"].size() == 1:
            for layer in (self.up, self.down):
                fully_shard(layer, mesh=mesh["data_parallel"])
            fully_shard(self, mesh=mesh["data_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.down(self.drop(torch.relu(self.norm(self.up(x)))))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = self.trainer.strategy
        with own_states(strategy):
            states = strategy.lightning_module_state_dict()
        self.copied = [
            name
            for name, tensor in self.named_parameters()
            if local_of(states[name]).data_ptr() != local_of(tensor).data_ptr()
        ]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Look(pl.Callback):
    """Keeps the whole state that training starts with."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.state = state_of(trainer)


def state_of(trainer: Any) -> dict[str, Any]:
    """Weights and optimizer states, put together from all ranks."""
    return {
        "model": whole(trainer.strategy.model.state_dict()),
        "optimizers": [whole(optimizer.state_dict()) for optimizer in trainer.optimizers],
    }


def strategy_for(job: dict[str, Any]) -> Any:
    """Model parallel in the shape that the job names, or something else by its name."""
    shape = job["mesh"]
    if isinstance(shape, str):
        return shape
    return ModelParallelStrategy(
        data_parallel_size=shape[0], tensor_parallel_size=shape[1], **job.get("strategy", {})
    )


def main(job: dict[str, Any]) -> None:
    """Train as told, or only evaluate."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    pl.seed_everything(0)
    torch.manual_seed(job.get("seed", 0))
    look, callbacks = Look(), []
    if "root" in job:
        callbacks = [CheckpointCallback(job["root"], **job.get("callback", {}))]
    devices = int(os.environ["WORLD_SIZE"])
    options = {"strategy": strategy_for(job), "devices": devices, **job.get("trainer", {})}
    if "root" not in job:
        options["enable_checkpointing"] = False
    if "files" in job:
        callbacks = [ModelCheckpoint(job["files"], every_n_train_steps=3, filename="{step}")]
        options |= {"plugins": [TwoBufferCheckpointIO()], "enable_checkpointing": True}
    trainer = trainer_for(job["folder"], Script(job), look, *callbacks, **options)
    model = Sharded(job.get("dropout", 0.3))
    if "evaluate" in job:
        (found,) = trainer.validate(
            model, loader(shuffle=False), ckpt_path=job["evaluate"], verbose=False
        )
        result = {"state": state_of(trainer), "found": found}
    else:
        trainer.fit(model, loader(), loader(shuffle=False), **job.get("fit", {}))
        result = {"state": state_of(trainer), "began": look.state, "losses": model.losses}
        result["copied"] = model.copied
    result["rng"] = torch.get_rng_state()
    rank = os.environ["RANK"]
    torch.save(result, Path(f"{job['out']}.{rank}"))
    print(json.dumps({"what": "end", "step": trainer.global_step}), flush=True)
