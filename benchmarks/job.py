"""The training job every row of the benchmark runs: a small transformer, AdamW, real steps.

Knows the model and how long a step waits before its update. Knows nothing of checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSize:
    """How big the model and its batches are."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    context: int


FULL = JobSize(layers=9, width=768, vocabulary=9600, batch=4, context=64)
"""About 71 M parameters: 0.85 GB with AdamW's two moments."""

QUICK = JobSize(layers=2, width=256, vocabulary=2048, batch=4, context=32)
"""About 2 M parameters: 25 MB, for a smoke test."""


class Transformer(nn.Module):
    """Predicts the next token; the output layer shares no weight with the embedding."""

    def __init__(self, size: JobSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width, size.width // 64, 4 * size.width, dropout=0.0, batch_first=True
            )
            for _ in range(size.layers)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One optimizer step: when it began, all of it, and the part it stood waiting for a copy."""

    began: float
    seconds: float
    waited_s: float

    @property
    def worked_s(self) -> float:
        return self.seconds - self.waited_s


class Job:
    """A model and an optimizer that have taken one step, so that all of the state exists."""

    def __init__(self, size: JobSize) -> None:
        torch.manual_seed(0)
        self.size = size
        self.model = Transformer(size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._hooks_began = 0.0
        self._waited_s = 0.0
        # Global hooks run in the order of their registration, then the optimizer's own: what
        # passes between these two is a checkpointer's global hook, registered after the first.
        register_optimizer_step_pre_hook(self._enter_hooks)
        self.optimizer.register_step_pre_hook(self._leave_hooks)
        self.step()

    def _enter_hooks(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._hooks_began = time.perf_counter()

    def _leave_hooks(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._waited_s += time.perf_counter() - self._hooks_began

    def step(self, fence: Callable[[], None] | None = None) -> StepTime:
        """Forward, backward, `fence` if any, update."""
        began = time.perf_counter()
        self._waited_s = 0.0
        tokens = torch.randint(self.size.vocabulary, (self.size.batch, self.size.context))
        self.model(tokens).square().mean().backward()
        if fence is not None:
            before = time.perf_counter()
            fence()
            self._waited_s += time.perf_counter() - before
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepTime(began=began, seconds=time.perf_counter() - began, waited_s=self._waited_s)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain nested dicts, for the peers that want one."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the state, once."""
        yield from self.model.state_dict().values()
        for moments in self.optimizer.state_dict()["state"].values():
            yield from (value for value in moments.values() if isinstance(value, torch.Tensor))

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())
