"""Generations that the archive did not take: in which order they are tried again, and when.

One whose requests always fail must not hold up the others, and an archive that is down must not be
asked for each of them in turn. One that asks to be left alone is. Knows ids and times. Knows
nothing of stores.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence

from torch_ckpt.errors import ServerBusy
from torch_ckpt.generations.catalog import Generation

logger = logging.getLogger(__name__)

_LONGEST_S = 600.0
_IN_A_ROW = 2
_LONGEST_PAUSE_S = 60.0
_SAY_EVERY_S = 60.0


class Setbacks:
    """What failed so far, and in the round that is under way."""

    def __init__(self) -> None:
        self._failures: dict[tuple[int, str], int] = {}
        self._until: dict[tuple[int, str], float] = {}
        self._failed: list[Generation] = []
        self._error: Exception | None = None
        self._in_a_row, self._went = 0, False
        self._rounds_failed = 0
        self._said = float("-inf")

    def begin(self, waiting: Sequence[Generation]) -> list[Generation]:
        """A round begins: those to try in it, first the ones that failed least often."""
        self._failed, self._error = [], None
        self._in_a_row, self._went = 0, False
        now = time.monotonic()
        due = [one for one in waiting if self._until.get(one.id, now) <= now]
        return sorted(due, key=lambda one: self._failures.get(one.id, 0))

    def failed(self, one: Generation, error: Exception) -> bool:
        """One was not taken; whether that is so many in a row that the archive itself is down."""
        self._failures[one.id] = self._failures.get(one.id, 0) + 1
        self._failed.append(one)
        self._error = self._error or error
        self._in_a_row += 1
        return self._in_a_row >= _IN_A_ROW

    def went(self) -> None:
        """One met no failure."""
        self._in_a_row, self._went = 0, True

    def end(self) -> tuple[Exception, float] | None:
        """The round is over: why some were held back, and for how many seconds; None if none was.

        Raises the first failure if nothing went well: then it is not about one generation.
        """
        if self._error is None:
            return None
        if not self._went:
            raise self._error
        pause_s = 0.0
        for one in self._failed:
            wait_s = min(_LONGEST_S, 2.0 ** min(self._failures[one.id], 10))
            wait_s *= random.uniform(0.5, 1.0)
            self._until[one.id] = time.monotonic() + wait_s
            pause_s = max(pause_s, wait_s)
        return self._error, pause_s

    def round_went(self) -> None:
        """A round met no failure that was about all of them."""
        self._rounds_failed = 0

    def round_failed(self, error: Exception) -> float:
        """A round met one; the seconds until the next."""
        self._rounds_failed += 1
        if isinstance(error, ServerBusy):
            # Never sooner, and not all ranks in the same moment.
            return error.retry_after_s * random.uniform(1.0, 1.1)
        longest_s = min(_LONGEST_PAUSE_S, 2.0 ** min(self._rounds_failed, 6))
        return longest_s * random.uniform(0.5, 1.0)

    def complain(self, waiting: int, where: str | None, error: Exception, pause_s: float) -> None:
        """Say why generations wait, once a minute."""
        now = time.monotonic()
        if now - self._said < _SAY_EVERY_S:
            return
        self._said = now
        logger.warning(
            "%d generations wait for %s, which does not take them all (%s); trying again in %.0f s",
            waiting,
            where,
            error,
            pause_s,
        )

    def over(self, key: tuple[int, str]) -> None:
        """One is archived, or never will be."""
        self._failures.pop(key, None)
        self._until.pop(key, None)
