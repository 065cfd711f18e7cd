"""What saves cost, as numbers in the trainer's loggers.

Knows loggers and the session's saves. Knows nothing of when to save.
"""

from __future__ import annotations

from typing import Any

from lightning_ckpt.private import Trainer, logger_step
from lightning_ckpt.session import Session


def report(session: Session, trainer: Trainer, pl_module: Any) -> None:
    """Log what a save cost, once it is known."""
    news = session.settle()
    if news and trainer.loggers and trainer.is_global_zero:
        pl_module.log_dict(
            _numbers(session, trainer),
            on_step=True,
            on_epoch=False,
            logger=True,
            rank_zero_only=True,
            batch_size=1,
        )


def report_last(session: Session, trainer: Trainer) -> None:
    """Log what the last save cost, where training has ended and no `log` is allowed any more."""
    numbers = _numbers(session, trainer)
    if not trainer.loggers or not numbers:
        return
    trainer.logged_metrics.update(numbers)
    for each in trainer.loggers if trainer.is_global_zero else ():
        each.log_metrics(numbers, step=logger_step(trainer))


def _numbers(session: Session, trainer: Trainer) -> dict[str, float]:
    latest, committed = session.latest, session.committed
    if latest is None or committed is None:
        return {}
    return {
        "ckpt/blocked_s": latest.blocked_s,
        "ckpt/persist_s": committed.persist_s or 0.0,
        "ckpt/bytes": float(committed.bytes),
        "ckpt/archive_lag": float(session.archive_lag),
        "ckpt/lag_steps": float(trainer.global_step - committed.step),
    }
