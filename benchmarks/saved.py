"""What the saves of one row cost, and the numbers that are made of it.

Knows times. Knows nothing of who saves or what.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from job import StepTime


@dataclass(kw_only=True, slots=True)
class Saved:
    """What one save cost."""

    blocked_s: float
    durable_s: float = 0.0
    busy_steps: list[StepTime] = field(default_factory=list)
    ended: float = 0.0

    def extra_s(self, clean_s: float) -> float:
        """How much longer the steps took because something was being persisted beside them."""
        return sum(step.worked_s - clean_s for step in self.busy_steps)

    def slowdown(self, clean_s: float) -> float | None:
        """By how much a step is longer while something is persisted beside it; None if none was."""
        beside = sum(
            min(step.began + step.seconds, self.ended) - step.began - step.waited_s
            for step in self.busy_steps
        )
        extra = self.extra_s(clean_s)
        return extra / (beside - extra) if beside > extra and self.busy_steps else None


def summary(
    *, title: str, state_bytes: int, persists: bool, clean: list[StepTime], taken: list[Saved]
) -> dict[str, Any]:
    """The numbers of one row."""
    step_s = statistics.median(step.worked_s for step in clean)
    slowdowns = [value for saved in taken if (value := saved.slowdown(step_s)) is not None]
    lost = [saved.blocked_s + saved.extra_s(step_s) for saved in taken]
    return {
        "title": title,
        "state_bytes": state_bytes,
        "step_s": step_s,
        "first_blocked_s": taken[0].blocked_s,
        "median_blocked_s": statistics.median(saved.blocked_s for saved in taken[1:]),
        "durable_s": statistics.median(s.durable_s for s in taken) if persists else None,
        "slowdown": statistics.median(slowdowns) if slowdowns else None,
        "lost_s": statistics.median(lost),
        "saves": [
            {
                "blocked_s": saved.blocked_s,
                "durable_s": saved.durable_s,
                "busy_steps": len(saved.busy_steps),
                "extra_s": saved.extra_s(step_s),
            }
            for saved in taken
        ],
    }
