"""Lightning on top of torch_ckpt: a callback and a Fabric object that save and resume; a plugin.

Lazy: which of Lightning's two package names is in use is asked when a class is first needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_ckpt.callback import CheckpointCallback
    from lightning_ckpt.checkpoint_io import TwoBufferCheckpointIO
    from lightning_ckpt.fabric import attach
    from lightning_ckpt.reading import open_checkpoint, read_checkpoint

__all__ = [
    "CheckpointCallback",
    "TwoBufferCheckpointIO",
    "attach",
    "open_checkpoint",
    "read_checkpoint",
]

_HOMES = {
    "CheckpointCallback": "lightning_ckpt.callback",
    "TwoBufferCheckpointIO": "lightning_ckpt.checkpoint_io",
    "attach": "lightning_ckpt.fabric",
    "open_checkpoint": "lightning_ckpt.reading",
    "read_checkpoint": "lightning_ckpt.reading",
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
