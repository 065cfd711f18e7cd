"""A small training job, as functions for this process and as processes of its own to be killed.

A job is described by one dictionary; it prints one JSON line a step, and writes what came out of
a finished run to a file. Run it again after a kill, with the same dictionary.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ckpt import CheckpointCallback, TwoBufferCheckpointIO
from tests.running import Done, Running, environments
from tests.tensors import digest_of, tensors_in

HERE = "tests.lightning.job"

SAMPLES, BATCH = 64, 8
STEPS_A_EPOCH = SAMPLES // BATCH

for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*does not have many workers.*")
warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")


def net_for(package: Any) -> type[Any]:
    """The module to train, as a LightningModule of a package."""

    class Net(package.LightningModule):
        def __init__(self, width: int = 8, lr: float = 0.01, extra: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(
                nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1)
            )
            self.lr = lr

        def loss(self, batch: Any) -> torch.Tensor:
            return ((self.net(batch[0]) - batch[1]) ** 2).mean()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), self.lr)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    Net.__qualname__ = "Net"  # so that it can be pickled, for `ddp_spawn`
    return Net


Net = net_for(pl)


def loader(*, shuffle: bool = True) -> DataLoader[Any]:
    """The data, always the same."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH, shuffle=shuffle)


def trainer_for(folder: Path | str, *callbacks: Any, package: Any = pl, **options: Any) -> Any:
    """A quiet trainer on the CPU."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "default_root_dir": str(folder),
    }
    return package.Trainer(callbacks=list(callbacks), **{**settings, **options})


def outcome(trainer: Any) -> dict[str, Any]:
    """What two equal runs have in common at the end."""
    state = {
        "model": trainer.lightning_module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
    }
    return {
        "step": trainer.global_step,
        "digest": digest_of(tensors_in(state)),
        "rng": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    }


# ── the script ────────────────────────────────────────────────────────────────────────────────


class Script(pl.Callback):
    """Says every step, and does what the job is told to do at one of them."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.say(trainer, "start")

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        # Before the batch after that step: callbacks that save have had their turn.
        step, rank = trainer.global_step, trainer.global_rank
        self.say(trainer, "step")
        if step == self.job.get("kill_at"):
            saved = self.job.get("after_step")
            while saved is not None and not committed(self.job["root"], saved):
                time.sleep(0.01)
            trainer.strategy.barrier("all ranks have come this far")
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.job.get("reload_at"):
            path = Path(self.job["folder"]) / "reloaded.ckpt"
            trainer.save_checkpoint(path)
            loaded = trainer.strategy.load_checkpoint(path)
            print(json.dumps({"what": "reloaded", "step": loaded["global_step"], "rank": rank}))
        if step == self.job.get("sigterm_at") and rank in self.job.get("sigterm_ranks", [0, 1]):
            os.kill(os.getpid(), signal.SIGTERM)

    def say(self, trainer: Any, what: str) -> None:
        line = {"what": what, "step": trainer.global_step, "rank": trainer.global_rank}
        print(json.dumps(line), flush=True)


def committed(root: str, step: int) -> bool:
    """Whether a generation of this step is there."""
    return (Path(root) / f"step-{step:010d}" / "manifest.json").exists()


def main(job: dict[str, Any]) -> None:
    """Train as told."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    package = importlib.import_module(job.get("package", "lightning.pytorch"))
    package.seed_everything(0)  # of the command, as the seed of distributed samplers is
    torch.manual_seed(job.get("seed", 0))
    root = job["root"]
    if isinstance(root, list):  # one for each rank, as if it were not shared
        root = root[int(os.environ.get("LOCAL_RANK", "0"))]
    callback = CheckpointCallback(root, **job.get("callback", {}))
    options = {"plugins": [TwoBufferCheckpointIO()]} if job.get("plugin") else {}
    trainer = trainer_for(
        job["folder"], Script(job), callback, package=package, **options, **job.get("trainer", {})
    )
    trainer.fit(net_for(package)(), loader(), loader(shuffle=False), **job.get("fit", {}))
    result = outcome(trainer)
    if trainer.is_global_zero and "out" in job:
        Path(job["out"]).write_text(json.dumps(result))


# ── running it ────────────────────────────────────────────────────────────────────────────────


def start(job: dict[str, Any], **env: str) -> Running:
    """Start one process of a job, by the `main` of its `module`."""
    return Running(f"{job.get('module', HERE)}:main", HERE, job, **env)


def run(job: dict[str, Any], **env: str) -> Done:
    """Run a job in one process to its end, whatever that is."""
    return start(job, **env).wait()


def run_ranks(job: dict[str, Any], world_size: int = 2) -> list[Done]:
    """Run a job as torchrun would: a process a rank."""
    ranks = [start(job, **env) for env in environments(world_size)]
    return [rank.wait() for rank in ranks]
