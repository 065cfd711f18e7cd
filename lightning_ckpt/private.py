"""What Lightning has no public name for: every private access of this adapter to a trainer.

Checked against Lightning 2.5.5 to 2.6.6. Knows the trainer's loops and connectors. Decides nothing.
"""

from __future__ import annotations

from typing import Any

Trainer = Any
"""A trainer of either twin package."""


def validation_follows(trainer: Trainer) -> bool:
    """Whether the training loop will validate right after this batch."""
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def validates_by_time(trainer: Trainer) -> bool:
    """Whether a clock, which differs between ranks, says when to validate."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def stops_early(trainer: Trainer) -> bool:
    """Whether training was told to stop, and has done the least it must do."""
    return bool(trainer.should_stop and trainer.fit_loop._can_stop_early)


def logger_step(trainer: Trainer) -> int:
    """The step at which loggers are given numbers: batches that stepped, not optimizer steps."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def slurm_checkpoint(trainer: Trainer) -> str | None:
    """The `hpc_ckpt_*.ckpt` that Lightning prefers to everything else when it runs under SLURM."""
    return trainer._checkpoint_connector._hpc_resume_path


def handlers_besides_lightnings(handler: Any) -> list[Any]:
    """What a SIGTERM handler that Lightning installed calls, but for Lightning's own part."""
    parts = getattr(handler, "signal_handlers", [handler])
    return [
        part
        for part in parts
        if callable(part) and getattr(part, "__name__", "") != "_sigterm_notifier_fn"
    ]
