"""Whether the Transformers that is installed is one that `TrainerCheckpoint` was made for.

Knows names, signatures and lines of the Trainer. Knows nothing of what they do.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import transformers
from packaging.version import Version
from transformers import Trainer

from torch_ckpt import ConfigError

logger = logging.getLogger(__name__)

TESTED = ("5.20.2", "5.25")
"""The versions that the tests ran with: from the first, up to and without the second."""

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "train": ("resume_from_checkpoint", "trial"),
    "_save_checkpoint": ("model", "trial"),
    "_get_output_dir": ("trial",),
    "_save": ("output_dir", "state_dict"),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_save_scaler": ("output_dir",),
    "_save_rng_state": ("output_dir",),
    "_load_from_checkpoint": ("resume_from_checkpoint",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_scaler": ("checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "_load_best_model": (),
    "_finalize_training": (),
}
_LINES: dict[str, tuple[str, ...]] = {
    "_inner_training_loop": ("self._run_epoch(", "self._tr_loss = ", "on_train_begin("),
    "_prepare_for_training": ("self._load_optimizer_and_scheduler(",),
    "_run_epoch": (
        "train_dataloader = skip_first_batches(train_dataloader, steps_trained_in_current_epoch)",
        "self._load_rng_state(resume_from_checkpoint)",
    ),
    "_save_checkpoint": (
        "self._get_output_dir(",
        "self.save_model(",
        "self._save_optimizer_and_scheduler(",
        "self._save_rng_state(",
        "TRAINER_STATE_NAME",
    ),
}
"""What the Trainer does on its instance, where this adapter stands in."""

_warned = False


def check_transformers() -> None:
    """Warn about an untested Transformers, and refuse one whose Trainer has changed.

    Raises:
        ConfigError: something that this adapter builds on is not there any more.
    """
    global _warned
    found = transformers.__version__
    for what in _changes(Trainer):
        raise ConfigError(
            f"Transformers {found} is not served: {what}; this version of torch-ckpt was tested "
            f"with {TESTED[0]} and newer, before {TESTED[1]}"
        )
    if not _warned and not Version(TESTED[0]) <= Version(found) < Version(TESTED[1]):
        _warned = True
        logger.warning(
            "Transformers %s is untested with this version of torch-ckpt, which was tested with "
            "%s and newer, before %s",
            found,
            *TESTED,
        )


def _changes(kind: Any) -> list[str]:
    """What is not as this adapter needs it, in words."""
    found = [
        f"Trainer.{name}({', '.join(wanted)}) has become ({', '.join(names)})"
        for name, wanted in _PARAMETERS.items()
        for names in [_names(getattr(kind, name, None))]
        if names[: len(wanted)] != list(wanted)
    ]
    for name, lines in _LINES.items():
        source = _source(getattr(kind, name, None))
        found += [f"Trainer.{name} has no {line}" for line in lines if line not in source]
    return found


def _names(function: Callable[..., Any] | None) -> list[str]:
    if function is None:
        return ["nothing"]
    return [name for name in inspect.signature(function).parameters if name != "self"]


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
