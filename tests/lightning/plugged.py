"""Trainers with the plugin, and what they save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.lightning.job import trainer_for


def trainer_with(plugin: Any, folder: Path, *callbacks: Any, **options: Any) -> Any:
    return trainer_for(folder, *callbacks, plugins=[plugin], **options)


def checkpoints_of(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "files", **{"monitor": "val_loss", **options})


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, with types and tied tensors."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            type(one) is type(other)
            and list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    return bool(one == other) and type(one) is type(other)


def checkpoint(step: int) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((4,), float(step))}, "global_step": step}
