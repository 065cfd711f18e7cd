"""A job whose every batch is a line of sample numbers, to be run by some ranks and then by others.

Runs where `tests.lightning.job` starts it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from lightning_ckpt import CheckpointCallback
from tests.lightning.job import trainer_for
from torch_ckpt import RngState

warnings.filterwarnings("ignore")


class Numbers(Dataset[int]):
    """Samples that are their own numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Own(Sampler[int]):
    """A sampler of the user's: some order."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return iter(range(self.size))


class Net(pl.LightningModule):
    def __init__(self, sigterm_after: list[int] | None) -> None:
        super().__init__()
        self.sigterm_after = sigterm_after
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        say(self.trainer, "batch", ids=batch.tolist(), index=batch_idx, rng=rng())
        if [self.current_epoch, batch_idx] == self.sigterm_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.net(batch[:, None].float() / 100).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 0 and not self.trainer.sanity_checking:
            say(self.trainer, "validation")

    def on_train_epoch_end(self) -> None:
        say(self.trainer, "epoch end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def rng() -> str:
    """The random state of this process, in short."""
    digest = hashlib.sha256(repr(random.getstate()).encode() + repr(np.random.get_state()).encode())
    digest.update(RngState().state_dict()["torch"].numpy().tobytes())
    return digest.hexdigest()[:16]


def say(trainer: Any, what: str, **more: Any) -> None:
    line = {"what": what, "epoch": trainer.current_epoch, "step": trainer.global_step, **more}
    print(json.dumps(line), flush=True)


def main(job: dict[str, Any]) -> None:
    """Train as told."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    pl.seed_everything(job.get("seed", 0))
    size = job["samples"]
    generator = torch.Generator().manual_seed(4) if job.get("generator") else None
    options: dict[str, Any] = {"shuffle": job.get("shuffle", True)}
    trainer_options = dict(job["trainer"])
    if job.get("sampler") == "own":
        options = {"sampler": Own(size)}
    if job.get("sampler") == "distributed":
        ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        options = {"sampler": DistributedSampler(Numbers(size), ranks, rank, shuffle=False)}
        trainer_options["use_distributed_sampler"] = False
    if workers := job.get("workers"):  # by fork: this process may come from a fork server
        options |= {"num_workers": workers, "multiprocessing_context": "fork"}
        options["persistent_workers"] = job.get("persistent", False)
    data = DataLoader(Numbers(size), job["batch"], generator=generator, **options)
    validation = DataLoader(Numbers(4), 2) if job.get("validate") else None
    callback = CheckpointCallback(job["root"], **job.get("callback", {}))
    trainer = trainer_for(job["folder"], callback, num_sanity_val_steps=0, **trainer_options)
    trainer.fit(Net(job.get("sigterm_after")), data, validation)
