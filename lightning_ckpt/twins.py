"""One adapter for two packages: `lightning` and its twin, the older `pytorch_lightning`.

Both define classes of the same names, and each accepts only its own. Knows where those classes
are. Knows nothing of what the adapter does with them.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_TRAINER_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_FABRIC_PACKAGES = ("lightning.fabric", "lightning_fabric")
_WITHOUT = "_without_bases"
_MISSING = (
    "lightning_ckpt needs Lightning, which is not installed: pip install 'torch-ckpt[lightning]'"
)


def fabric_modules() -> list[ModuleType]:
    """The fabric package of every installed twin; the one already in use comes first."""
    return _in_use_first(_FABRIC_PACKAGES, _FABRIC_PACKAGES)


def trainer_modules() -> list[ModuleType]:
    """The trainer package of every twin in use, or of the first installed one if none is yet.

    A twin that the program has not imported is left alone: importing it costs seconds, and no
    trainer of it can exist.
    """
    used = [name for name in _TRAINER_PACKAGES if name in sys.modules]
    return _in_use_first(used or _TRAINER_PACKAGES, _TRAINER_PACKAGES)[: len(used) or 1]


def checkpoint_io_bases() -> list[type[Any]]:
    """Every `CheckpointIO` that a trainer of either twin may ask for."""
    return [
        importlib.import_module(f"{module.__name__}.plugins").CheckpointIO
        for module in fabric_modules()
    ]


def torch_checkpoint_io() -> Any:
    """Lightning's own plugin, for what is an ordinary checkpoint."""
    return importlib.import_module(f"{fabric_modules()[0].__name__}.plugins").TorchCheckpointIO()


def callback_bases(name: str) -> tuple[type[Any], ...]:
    """The callback class of that name in every twin that the program uses."""
    return tuple(
        getattr(importlib.import_module(f"{module.__name__}.callbacks"), name)
        for module in trainer_modules()
    )


def sigterm_exception(trainer: Any) -> BaseException:
    """What the trainer's own package raises after SIGTERM."""
    home = next(kind.__module__ for kind in type(trainer).__mro__ if kind.__name__ == "Trainer")
    package = home.removesuffix(".trainer.trainer")
    return importlib.import_module(f"{package}.utilities.exceptions").SIGTERMException()


@functools.cache
def with_bases(cls: type[Any], bases: tuple[type[Any], ...]) -> type[Any]:
    """A class that is `cls` to its users and one of `bases` to Lightning."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, *bases), {**names, _WITHOUT: cls})


def without_bases(cls: type[Any]) -> type[Any]:
    """The class that `with_bases` was given; it can be pickled."""
    return getattr(cls, _WITHOUT, cls)


def _in_use_first(names: tuple[str, ...] | list[str], known: tuple[str, ...]) -> list[ModuleType]:
    ordered = sorted(names, key=lambda name: (name not in sys.modules, known.index(name)))
    installed = [name for name in ordered if find_spec(name.partition(".")[0]) is not None]
    if not installed:
        raise ModuleNotFoundError(_MISSING, name=known[0])
    return [importlib.import_module(name) for name in installed]
