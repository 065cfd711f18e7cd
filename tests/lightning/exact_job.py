"""Ways to train: a small noisy model, and loaders of every kind. For the tests of exact resume."""

from __future__ import annotations

import importlib
import logging
import random
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchmetrics import MeanMetric

SAMPLES, BATCH = 64, 8
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


_Module: Any = pl.LightningModule if TYPE_CHECKING else object


# ── what is trained ───────────────────────────────────────────────────────────────────────────


class Noisy(Dataset):
    """Samples that are augmented with all three global random generators."""

    reads = 0

    def __init__(self, size: int = SAMPLES, *, augment: bool = True) -> None:
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        Noisy.reads += 1
        x = self.x[index]
        if self.augment:
            x = x + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return x, index


class Stream(IterableDataset):
    """The same samples as a stream, shuffled in part, split among workers."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.inner = Noisy(size)

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        held: list[int] = []
        for index in range(first, len(self.inner), step):
            held.append(index)
            if len(held) == 8:
                yield self.inner[held.pop(random.randrange(8))]
        yield from (self.inner[index] for index in held)


class Model(_Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        self.mean = MeanMetric()
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.automatic_optimization = not case.manual

    def configure_optimizers(self) -> Any:
        if self.case.estimate:
            _ = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.case.plateau is None:
            scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=0.5, factor=0.5
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "monitor": self.case.plateau,
                "interval": self.case.plateau_interval,
            },
        }

    def _train(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trainer.events.tick(self.trainer)
        parts = batch if self.case.several else [batch]
        x = torch.cat([part[0] for part in parts if part is not None])
        self.scale.mul_(0.99).add_(x.mean().detach() * 0.01)
        loss = (self.net(x) * self.scale - x.sum(1, keepdim=True)).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(x))
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True, batch_size=len(x))
        if self.case.manual:
            self.manual_backward(loss)
            if (batch_idx + 1) % 3 == 0:
                self.optimizers().step()
                self.optimizers().zero_grad()
        return loss

    training_step = _train

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, index = batch
        loss = (self.net(x) + 0.1 * torch.randn(len(x), 1)).pow(2).mean()
        if not self.trainer.sanity_checking:
            self.trainer.events.add("val", self.trainer.global_step, index, loss)
        self.log("val_loss", loss, sync_dist=True)

    def on_train_epoch_start(self) -> None:
        torch.rand(1)  # hooks may draw

    def on_train_start(self) -> None:
        torch.rand(3)  # after the callbacks' hook of this name: must not matter in a resumed run


class Fetching(Model):
    """Its step fetches its batch itself."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # another shape of the hook
        batch, batch_idx, _ = next(dataloader_iter)
        return self._train(batch, batch_idx)


# ── cases ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Case:
    """One way to train."""

    loader: str = "plain"
    workers: int = 0
    persistent: bool = False
    augment: bool = True
    generator: bool = False
    validate: bool = False
    estimate: bool = False
    manual: bool = False
    plateau: str | None = None
    plateau_interval: str = "epoch"
    loaders_in_module: bool = False
    trainer: tuple[tuple[str, Any], ...] = ()
    step_fetches: bool = False
    stop_early: bool = False
    package: str = "lightning.pytorch"

    @property
    def several(self) -> bool:
        return self.loader.startswith("combined")

    def train_loader(self) -> Any:
        generator = torch.Generator().manual_seed(9) if self.generator else None
        options: dict[str, Any] = {
            "batch_size": BATCH,
            "num_workers": self.workers,
            "generator": generator,
            "persistent_workers": self.persistent,
        }
        data = Noisy(augment=self.augment)
        if self.loader == "plain":
            return DataLoader(data, shuffle=True, **options)
        if self.loader == "tensors":
            data = TensorDataset(data.x, torch.arange(SAMPLES))
            return DataLoader(data, shuffle=True, **options)
        if self.loader == "weighted":
            weights = torch.arange(1.0, SAMPLES + 1).tolist()
            sampler = WeightedRandomSampler(weights, SAMPLES, generator=generator)
            return DataLoader(data, sampler=sampler, **options)
        if self.loader == "stream":
            return DataLoader(Stream(), **options)
        if self.loader == "stateful":
            stateful = pytest.importorskip("torchdata.stateful_dataloader")
            return stateful.StatefulDataLoader(data, shuffle=True, **options)
        _, mode = self.loader.split(":")
        short = DataLoader(Noisy(24), shuffle=True, **options)
        shorter = DataLoader(Noisy(16), shuffle=True, **options)
        long = DataLoader(data, shuffle=True, **options)
        utilities = importlib.import_module(f"{self.package}.utilities")
        return utilities.CombinedLoader([short, long, shorter], mode)

    def validation_loader(self) -> DataLoader | None:
        if not self.validate:
            return None
        generator = torch.Generator().manual_seed(3) if self.generator else None
        return DataLoader(
            Noisy(16, augment=not self.persistent),
            batch_size=8,
            shuffle=True,
            generator=generator,
            num_workers=1 if self.persistent else 0,
            persistent_workers=self.persistent,
        )


def options(**values: Any) -> tuple[tuple[str, Any], ...]:
    """Trainer options of a case, hashable."""
    return tuple(sorted(values.items()))
