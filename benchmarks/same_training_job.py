"""One training run that is saved in several ways, and goes on from what each of them gives back.

The same batches follow whatever it was resumed from. Knows the public surface of torch_ckpt.
Judges nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from codecs_job import CONTEXT, GPT, loss_of, sources

from torch_ckpt import Checkpointer

LOSSLESS = "lossless"
NOISE = "lossless + noise"
"""Resumed without loss, then each weight is changed by about a millionth of itself: how far
training goes apart whatever the reason."""

NOISE_PART = 2.0**-20
HELD_OUT = 0.9
"""The sources from here on are for the losses that are compared."""
JUDGED = 256


class Plan(NamedTuple):
    """How long one run is, and where it is resumed."""

    width: int
    layers: int
    every: int
    """Steps between saves."""
    points: tuple[int, ...]
    """Saves, from 1 up, from which training is resumed."""
    further: int
    """Steps from there."""

    @property
    def steps(self) -> int:
        """Of the run itself."""
        return self.every * self.points[-1]


def methods(error: float) -> dict[str, dict[str, Any]]:
    """Options by name. All of a chain's saves are made, so that what is lost could add up."""
    fp8 = {"moments": "fp8"}
    delta = {"lossy_delta": {"model.*": error}, "incremental": True}
    return {LOSSLESS: {}, "fp8": fp8, "lossy-delta": delta, "both": fp8 | delta}


class Run:
    """A GPT, AdamW, and batches that follow from the seed and the step alone."""

    def __init__(self, plan: Plan, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.seed = seed
        self.model = GPT(plan.width, plan.layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self._limit = int(HELD_OUT * len(sources())) - CONTEXT - 1

    def train(self, first: int, last: int) -> None:
        """The steps from `first` to `last`, both included."""
        for step in range(first, last + 1):
            order = torch.Generator().manual_seed((self.seed << 32) + step)
            self.optimizer.zero_grad()
            loss_of(self.model, torch.randint(self._limit, (16,), generator=order)).backward()
            self.optimizer.step()

    def shake(self) -> None:
        """Change each weight by a little, by chance."""
        order = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for weights in self.model.parameters():
                weights.mul_(1 + NOISE_PART * torch.randn(weights.shape, generator=order))

    def judged(self) -> float:
        """The loss on text that nothing was trained on, the same for every run."""
        order = torch.Generator().manual_seed(0)
        first, last = self._limit + CONTEXT, len(sources()) - CONTEXT - 1
        here = torch.randint(first, last, (JUDGED,), generator=order)
        with torch.no_grad():
            return float(loss_of(self.model, here))


def measure(plan: Plan, seed: int, error: float) -> list[dict[str, Any]]:
    """Train with one seed; what came of each resume."""
    return list(_measured(plan, seed, error))


def _measured(plan: Plan, seed: int, error: float) -> Iterator[dict[str, Any]]:
    run = Run(plan, seed)
    with _checkpointers(error) as checkpointers:
        for number in range(1, plan.points[-1] + 1):
            run.train((number - 1) * plan.every + 1, number * plan.every)
            for checkpointer in checkpointers.values():
                checkpointer.save(run.state, number * plan.every, block="committed")
        for step in (number * plan.every for number in plan.points):
            for method in (*checkpointers, NOISE):
                resumed = Run(plan, seed)
                resumed.train(1, 1)  # all of its state exists, and all of it is replaced
                generation = checkpointers.get(method, checkpointers[LOSSLESS]).load(
                    resumed.state, step
                )
                if method == NOISE:
                    resumed.shake()
                at_once = resumed.judged()
                resumed.train(step + 1, step + plan.further)
                yield {
                    "seed": seed,
                    "step": step,
                    "method": method,
                    "lossy": generation.tags.get("lossy"),
                    "raw_bytes": 3 * sum(p.nbytes for p in run.model.parameters()),
                    "stored_bytes": generation.stored_bytes,
                    "loss_resumed": at_once,
                    "loss_further": resumed.judged(),
                }


@contextmanager
def _checkpointers(error: float) -> Iterator[dict[str, Checkpointer]]:
    """One of each kind, each with a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="same-training-", dir=Path.cwd()))
    try:
        with ExitStack() as closing_all:
            yield {
                method: closing_all.enter_context(
                    closing(Checkpointer(folder / method, keep=None, on_error="raise", **options))
                )
                for method, options in methods(error).items()
            }
    finally:
        shutil.rmtree(folder)
