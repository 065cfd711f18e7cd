"""Whether the Accelerate that is installed is one that this adapter was made for.

Knows names and signatures. Knows nothing of what they do.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import accelerate
from accelerate import Accelerator, data_loader
from packaging.version import Version

from torch_ckpt import ConfigError

logger = logging.getLogger(__name__)

TESTED = ("1.15.0", "1.16")
"""The versions that the tests ran with: from the first, up to and without the second."""

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "save_state": ("output_dir",),
    "load_state": ("input_dir",),
    "skip_first_batches": ("dataloader", "num_batches"),
    "prepare_data_loader": ("data_loader",),
    "end_training": (),
}
_SOURCES: dict[str, tuple[str, ...]] = {
    "DataLoaderShard": ("self.begin()", "self.base_dataloader.__iter__()", "self.end()"),
    "DataLoaderDispatcher": ("self.begin()", "self._fetch_batches(", "self.end()"),
}
"""What the iterators of prepared loaders call on their instance, where this adapter listens."""

_warned = False


def check_version() -> None:
    """Warn about an untested Accelerate, and refuse one whose insides have changed.

    Raises:
        ConfigError: something that this adapter builds on is not there any more.
    """
    global _warned
    found = accelerate.__version__
    for what in _changes(Accelerator, data_loader):
        raise ConfigError(
            f"Accelerate {found} is not served: {what}; this version of torch-ckpt was tested with "
            f"{TESTED[0]} and newer, before {TESTED[1]}"
        )
    if not _warned and not Version(TESTED[0]) <= Version(found) < Version(TESTED[1]):
        _warned = True
        logger.warning(
            "Accelerate %s is untested with this version of torch-ckpt, which was tested with %s "
            "and newer, before %s",
            found,
            *TESTED,
        )


def _changes(kind: Any, loaders: Any) -> list[str]:
    """What is not as this adapter needs it, in words."""
    found = [
        f"Accelerator.{name}({', '.join(wanted)}) has become ({', '.join(names)})"
        for name, wanted in _PARAMETERS.items()
        for names in [_names(getattr(kind, name, None))]
        if names[: len(wanted)] != list(wanted)
    ]
    for name, calls in _SOURCES.items():
        source = _source(getattr(loaders, name, None))
        found += [f"{name} has no call of {call}" for call in calls if call not in source]
    if "iteration=dataloader.iteration" not in _text(getattr(loaders, "skip_first_batches", None)):
        # So before 1.15: what it gives would be in the order of epoch 0, in a resumed run only.
        found.append("skip_first_batches does not keep the epoch")
    return found


def _names(function: Callable[..., Any] | None) -> list[str]:
    if function is None:
        return ["nothing"]
    return [name for name in inspect.signature(function).parameters if name != "self"]


def _source(kind: Any) -> str:
    return _text(getattr(kind, "__iter__", None))


def _text(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
