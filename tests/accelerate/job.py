"""A small Accelerate job, as a function for this process and as processes of its own to be killed.

A job is described by one dictionary; every rank writes one line a batch, and what came out of a
finished run to a file. Run it again after a kill, with the same dictionary.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate_ckpt import CheckpointPlugin, attach
from tests.running import LIMIT_S, Done, Running, environments
from tests.tensors import digest_of, tensors_in

# What Accelerate and torch import late, so that forked processes find it imported.
for name in ("torch._dynamo", "torch.distributed.checkpoint", "torch_ckpt.checkpointer"):
    importlib.import_module(name)

SAMPLES, BATCH = 44, 4


class Points(Dataset[Any]):
    """Samples with a number; read with noise from all three generators, if wanted."""

    def __init__(self, noise: bool) -> None:
        self.noise = noise
        self.x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = self.x[index]
        y = x.sum()
        if self.noise:
            x = x + torch.randn(6) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return x, y, index


class Stream(IterableDataset[Any]):
    """The same, one after the other."""

    def __init__(self, noise: bool) -> None:
        self.points = Points(noise)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.points[index] for index in range(SAMPLES)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).squeeze(-1)


class Progress:
    """What a script registers to find its way back."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class Interrupted(Exception):
    """Stands for a kill, in a process that is to live on."""


def reset() -> None:
    """Forget the Accelerators of this process, which share their state."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()


def loader_of(job: dict[str, Any]) -> DataLoader[Any]:
    noise, workers = job.get("noise", True), job.get("workers", 0)
    if job.get("stream"):
        return DataLoader(Stream(noise), BATCH, num_workers=workers)
    generator = torch.Generator().manual_seed(5) if job.get("generator") else None
    return DataLoader(
        Points(noise),
        BATCH,
        shuffle=job.get("shuffle", True),
        num_workers=workers,
        generator=generator,
    )


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train as told; what came out."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=job.get("accumulate", 1),
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=job.get("seedable", False),
            use_stateful_dataloader=job.get("stateful", False),
            dispatch_batches=job.get("dispatch"),  # type: ignore[arg-type]
        ),
        project_config=ProjectConfiguration(**job.get("project", {})),
    )
    attached = attach(accelerator, CheckpointPlugin(job["root"], **job.get("plugin", {})))
    torch.manual_seed(job.get("seed", 0) + accelerator.process_index)
    random.seed(job.get("seed", 0))
    np.random.seed(job.get("seed", 0))
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    model, optimizer, scheduler, loader = accelerator.prepare(
        net, optimizer, scheduler, loader_of(job)
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    position = attached.resume()
    print(json.dumps({"what": "start", "at": vars(progress)}), flush=True)
    seen = _Seen(job, accelerator)
    for epoch in range(progress.epoch, job.get("epochs", 3)):
        if job.get("set_epoch"):
            loader.set_epoch(epoch)
        passed = progress.batch
        batches, style = loader, job.get("style", "skip")
        if style == "position" and position is not None and position.epoch == epoch:
            passed = position.batch  # on each rank, of which there may be another number now
        if passed and style in ("skip", "position"):
            batches = accelerator.skip_first_batches(loader, passed)
        for place, (x, y, indices) in enumerate(batches):
            if passed and style == "manual" and place < passed:
                continue
            with accelerator.accumulate(model):
                loss = ((model(x) - y) ** 2).mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.batch += 1
            progress.batches += 1
            seen.add(epoch, indices, loss)
            if progress.batches in job.get("save_at", ()):
                accelerator.save_state()
            seen.end_here(attached, progress.batches)
        progress.epoch, progress.batch = epoch + 1, 0
        scheduler.step()
        if job.get("save_epochs"):
            accelerator.save_state()
        seen.end_here(attached, -epoch)
    attached.close()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    return {
        "batches": progress.batches,
        "position": None if position is None else [position.epoch, position.batch],
        "model": {k: digest_of([v]) for k, v in net.state_dict().items()},
        "optimizer": digest_of(tensors_in(state["optimizer"])),
        "random": digest_of([torch.get_rng_state()]),
        "seen": seen.lines,
    }


class _Seen:
    """Says what was trained on, and ends the run where the job says so."""

    def __init__(self, job: dict[str, Any], accelerator: Any) -> None:
        self.job, self.accelerator, self.lines = job, accelerator, []

    def add(self, epoch: int, indices: torch.Tensor, loss: torch.Tensor) -> None:
        self.lines.append([epoch, indices.tolist(), loss.item()])
        print(json.dumps({"what": "batch", "at": time.time(), "seen": self.lines[-1]}), flush=True)

    def end_here(self, attached: Any, batches: int) -> None:
        if batches == self.job.get("interrupt_at"):
            attached.close()
            raise Interrupted
        if batches == self.job.get("kill_at"):
            deadline = time.monotonic() + 30
            while self.job.get("after_commits", 0) > len(committed(self.job["root"])):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            self.accelerator.wait_for_everyone()
            os.kill(os.getpid(), signal.SIGKILL)


def committed(root: str) -> list[str]:
    """Names of the generations that are there, oldest first."""
    found = [path.parent for path in Path(root).glob("*/manifest.json")]
    return [path.name for path in sorted(found, key=number_of)]


def number_of(folder: Path) -> int:
    return int(json.loads((folder / "manifest.json").read_text())["step"])


def main(job: dict[str, Any]) -> None:
    """A process of a job."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(relativeCreated)d %(name)s %(message)s"
    )
    torch.set_num_threads(1)
    result = train(job)
    if "out" in job:
        rank = PartialState().process_index
        Path(f"{job['out']}.{rank}").write_text(json.dumps(result))


# ── running it ────────────────────────────────────────────────────────────────────────────────


def start_ranks(job: dict[str, Any], world_size: int) -> list[Running]:
    """Start a job as torchrun would: a process a rank; one rank has no process group."""
    alone: list[dict[str, str]] = [{}]
    return [
        Running("tests.accelerate.job:forking", "tests.accelerate.job", job, **env)
        for env in (alone if world_size == 1 else environments(world_size))
    ]


def run(job: dict[str, Any], world_size: int = 1, timeout_s: float = LIMIT_S) -> list[Done]:
    """Run a job to its end, whatever that is."""
    return [rank.wait(timeout_s) for rank in start_ranks(job, world_size)]


def forking(job: dict[str, Any]) -> None:
    """Run the `main` of a job, whose workers are forked: they would import torch again."""
    multiprocessing.set_start_method("fork", force=True)
    module, _, name = job.get("main", "tests.accelerate.job:main").partition(":")
    getattr(importlib.import_module(module), name)(job)
