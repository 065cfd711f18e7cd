"""Short runs with the callback, and what they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import callbacks

from lightning_ckpt import CheckpointCallback
from tests.lightning.job import Net, loader, trainer_for
from torch_ckpt import (
    Checkpointer,
    Generation,
)


def fit(folder: Path, *callbacks: Any, model: Any = None, **options: Any) -> Any:
    """Train for two epochs of 8 steps, or as `options` say; return the trainer."""
    given = {key: options.pop(key) for key in ("ckpt_path", "weights_only") if key in options}
    validated = options.pop("validated", True)
    trainer = trainer_for(folder, *callbacks, **options)
    data = (loader(), loader(shuffle=False)) if validated else (loader(),)
    trainer.fit(model or Net(), *data, **given)
    return trainer


def saving(folder: Path, **options: Any) -> Any:
    """A callback that keeps everything, every third step."""
    given: dict[str, Any] = {"every_n_steps": 3, "keep": None, **options}
    return CheckpointCallback(folder / "run", **given)


def averaging(**options: Any) -> Any:
    """The callback that averages weights, which Lightning has since 2.6."""
    kind = getattr(callbacks, "EMAWeightAveraging", None)
    if kind is None:
        pytest.skip("this Lightning averages no weights")
    return kind(**options)


def generations(folder: Path) -> dict[int, Generation]:
    """By step."""
    with Checkpointer(folder / "run", distributed=False) as engine:
        return {one.step: one for one in engine.generations()}


class Starts(pl.Callback):
    """Notes at which step training starts."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps.append(trainer.global_step)
