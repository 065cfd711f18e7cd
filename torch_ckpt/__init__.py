"""Checkpoints for PyTorch training: saved in milliseconds, verified on load, resumed exactly.

Lazy: a name is imported when it is first used, so the writer process, which lives under this
package, starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_ckpt.checkpointer import Checkpointer
    from torch_ckpt.config import EncodingOptions
    from torch_ckpt.errors import (
        ArchiveTaken,
        CkptError,
        ClassNotLoaded,
        ConfigError,
        DisagreementError,
        FormatError,
        GenerationNotFound,
        IntegrityError,
        NotArchived,
        NothingUsable,
        PickleRefused,
        RunBusy,
        SaveFailed,
        SaveSkipped,
        ServerBusy,
        SnapshotTorn,
        StateMismatch,
        StorageError,
        UnexpectedFile,
        UnsupportedState,
        WriterDied,
    )
    from torch_ckpt.generations.catalog import Generation
    from torch_ckpt.generations.retention import (
        KeepBest,
        KeepEvery,
        KeepLast,
        Retention,
        parse_rule,
    )
    from torch_ckpt.once import load_generation, save_generation
    from torch_ckpt.pending import PendingSave
    from torch_ckpt.rng import RngState
    from torch_ckpt.staging.tree import PerRank

__version__ = "0.1.0"

__all__ = [
    "ArchiveTaken",
    "Checkpointer",
    "CkptError",
    "ClassNotLoaded",
    "ConfigError",
    "DisagreementError",
    "EncodingOptions",
    "FormatError",
    "Generation",
    "GenerationNotFound",
    "IntegrityError",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "NotArchived",
    "NothingUsable",
    "PendingSave",
    "PerRank",
    "PickleRefused",
    "Retention",
    "RngState",
    "RunBusy",
    "SaveFailed",
    "SaveSkipped",
    "ServerBusy",
    "SnapshotTorn",
    "StateMismatch",
    "StorageError",
    "UnexpectedFile",
    "UnsupportedState",
    "WriterDied",
    "load_generation",
    "parse_rule",
    "save_generation",
]

# The one place a public name is bound to its module at run time; the block above is for types.
_HOMES = {
    "Checkpointer": "torch_ckpt.checkpointer",
    "EncodingOptions": "torch_ckpt.config",
    "PendingSave": "torch_ckpt.pending",
    "load_generation": "torch_ckpt.once",
    "save_generation": "torch_ckpt.once",
    "Generation": "torch_ckpt.generations.catalog",
    "KeepBest": "torch_ckpt.generations.retention",
    "KeepEvery": "torch_ckpt.generations.retention",
    "KeepLast": "torch_ckpt.generations.retention",
    "Retention": "torch_ckpt.generations.retention",
    "parse_rule": "torch_ckpt.generations.retention",
    "RngState": "torch_ckpt.rng",
    "PerRank": "torch_ckpt.staging.tree",
}


if not TYPE_CHECKING:  # a checker that sees it takes every misspelt name for a known one

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES.get(name, "torch_ckpt.errors")), name)
        globals()[name] = value  # so that the next use does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
