"""When a save is due: every so many optimizer steps, every so many minutes, or every epoch.

Pure but for the clock that is handed in. Knows steps and seconds. Knows nothing of trainers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from torch_ckpt import ConfigError


class Schedule:
    """Says after each optimizer step whether a save is due; with no interval, at epoch ends."""

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        every_minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_n_steps is not None and (type(every_n_steps) is not int or every_n_steps < 1):
            raise ConfigError(
                f"every_n_steps must be a whole number from 1 up, or None, got {every_n_steps!r}"
            )
        if every_minutes is not None and not _is_positive(every_minutes):
            raise ConfigError(
                f"every_minutes must be a number above 0, or None, got {every_minutes!r}"
            )
        self.every_n_steps, self.every_minutes = every_n_steps, every_minutes
        self._clock = clock
        self._step = 0
        self._time = clock()

    @property
    def by_epoch(self) -> bool:
        """Whether epoch ends are the only occasions."""
        return self.every_n_steps is None and self.every_minutes is None

    def start(self, step: int) -> None:
        """Training begins or goes on at `step`, which needs no save."""
        self._step, self._time = step, self._clock()

    def step_due(self, step: int) -> bool:
        """Whether a multiple of `every_n_steps` was reached since the last save.

        Crossing counts: with two optimizers a step count may jump over the multiple itself.
        """
        n = self.every_n_steps
        return n is not None and step // n > self._step // n

    def time_due(self) -> bool:
        """Whether `every_minutes` have passed since the last save; differs between ranks."""
        minutes = self.every_minutes
        return minutes is not None and self._clock() - self._time >= 60 * minutes

    saved = start


def _is_positive(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )
