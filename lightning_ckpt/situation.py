"""What a callback asks about a trainer: what comes next, what ended it.

Knows a trainer's public attributes and `private`. Knows nothing of saves.
"""

from __future__ import annotations

import warnings

from lightning_ckpt import private
from lightning_ckpt.private import Trainer


def validation_follows(trainer: Trainer) -> bool:
    """Whether a save would be repeated at once, with the metrics of a validation."""
    follows = private.validation_follows(trainer)
    if private.validates_by_time(trainer) and trainer.world_size > 1:
        return trainer.strategy.broadcast(follows)
    return follows


def is_sigterm(exception: BaseException) -> bool:
    """Whether this is how Lightning ends training after SIGTERM."""
    return type(exception).__name__ == "SIGTERMException" and isinstance(exception, SystemExit)


def is_stopping(trainer: Trainer) -> bool:
    """Whether training ends after this batch."""
    steps = trainer.max_steps
    reached = steps not in (None, -1) and trainer.global_step >= steps
    return reached or private.stops_early(trainer)


def is_last_epoch(trainer: Trainer) -> bool:
    """Whether training ends after this epoch."""
    epochs = trainer.max_epochs
    return epochs not in (None, -1) and trainer.current_epoch + 1 >= epochs


def silence_untrue_warnings() -> None:
    """Two of Lightning's warnings are untrue where this callback offers the path."""
    for text in (
        r"`\.fit\(ckpt_path=None\)` was called without a model",
        r"\.fit\(ckpt_path=\"last\"\) is set, but there is no last checkpoint available",
    ):
        warnings.filterwarnings("ignore", message=text)
