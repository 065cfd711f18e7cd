"""Accelerate on top of torch_ckpt: a plugin, `attach`, and a launcher that needs no code at all.

Lazy: torch and Accelerate are imported when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate_ckpt.accelerator import Attached, attach
    from accelerate_ckpt.loaders import Position
    from accelerate_ckpt.plugin import CheckpointPlugin, CkptProjectConfiguration
    from accelerate_ckpt.trainer_callback import TrainerCheckpoint

__all__ = [
    "Attached",
    "CheckpointPlugin",
    "CkptProjectConfiguration",
    "Position",
    "TrainerCheckpoint",
    "attach",
]

_HOMES = {
    "Attached": "accelerate_ckpt.accelerator",
    "CheckpointPlugin": "accelerate_ckpt.plugin",
    "CkptProjectConfiguration": "accelerate_ckpt.plugin",
    "Position": "accelerate_ckpt.loaders",
    "TrainerCheckpoint": "accelerate_ckpt.trainer_callback",
    "attach": "accelerate_ckpt.accelerator",
}

if not TYPE_CHECKING:  # a checker that sees it takes every misspelt name for a known one

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value  # so that the next use does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
