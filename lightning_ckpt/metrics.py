"""Which of a trainer's metrics belong to a save: those measured on the state that is saved.

`callback_metrics` keeps the values of the last validation while training goes on; recorded with a
later step they would make `KeepBest` choose a model that was never validated. Knows metrics and
rules. Knows nothing of saves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_ckpt.private import Trainer
from torch_ckpt import Generation, KeepBest, Retention

logger = logging.getLogger(__name__)


class Metrics:
    """Knows which metrics come from validations, and at which step the last one was."""

    def __init__(self, keep: Retention | None) -> None:
        self._rules = [rule for rule in _rules_of(keep) if isinstance(rule, KeepBest)]
        self._validated_step: int | None = None
        self._of_validation: set[str] = set()
        self._before: dict[str, Any] = {}
        self._missed = False

    @property
    def wanted(self) -> bool:
        """Whether a rule needs the metrics of every validation."""
        return bool(self._rules)

    def before_validation(self, trainer: Trainer) -> None:
        """Remember the metrics there are."""
        self._before = dict(trainer.callback_metrics)

    def after_validation(self, trainer: Trainer) -> None:
        """What is another object now was measured by this validation."""
        after = trainer.callback_metrics
        self._of_validation |= {
            name for name, value in after.items() if self._before.get(name) is not value
        }
        self._before = {}
        self._validated_step = trainer.global_step

    def fresh(self, trainer: Trainer) -> dict[str, float]:
        """The numbers measured on the state as it is now."""
        stale = self._of_validation if self._validated_step != trainer.global_step else set()
        found = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name not in stale and _is_number(value)
        }
        self._say_if_missing(found)
        return found

    def best(self, committed: Sequence[Generation]) -> Generation | None:
        """The generation that the first `KeepBest` puts first, or else the newest."""
        for rule in self._rules:
            steps = KeepBest(rule.metric, 1, rule.mode).reasons(committed)
            chosen = [one for one in committed if one.step in steps]
            if chosen:
                return chosen[0]
        return committed[0] if committed else None

    def state(self) -> dict[str, Any]:
        """What a resumed run must know."""
        return {"of_validation": sorted(self._of_validation), "step": self._validated_step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `state` returned."""
        self._of_validation = set(state["of_validation"])
        self._validated_step = state["step"]

    def _say_if_missing(self, found: dict[str, float]) -> None:
        for rule in self._rules:
            if self._validated_step is not None and rule.metric not in {
                *found,
                *self._of_validation,
            }:
                if not self._missed:
                    logger.warning(
                        "KeepBest(%r) finds no such metric among %s; log it in the module",
                        rule.metric,
                        sorted({*found, *self._of_validation}),
                    )
                self._missed = True


def _rules_of(rule: Retention | None) -> list[Retention]:
    rules = getattr(rule, "rules", None)
    if rules is not None:
        return [inner for part in rules for inner in _rules_of(part)]
    return [] if rule is None else [rule]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return type(value) in (int, float)
