"""Ids of tries: a random session and a counter, so that one knows older from newer without clocks.

Knows ids. Knows nothing of saves.
"""

from __future__ import annotations

import secrets
from collections import deque

_SESSION_BITS, _COUNTER_BITS = 20, 12
FAILED = 4
"""Failures that a rank tells of: more than can be under way at once."""


class Attempts:
    """The attempts of one checkpointer: 5 hex digits of session, 3 of counter."""

    def __init__(self) -> None:
        self._session = 0
        self._count = (1 << _COUNTER_BITS) - 1
        self.failed: deque[str] = deque(maxlen=FAILED)
        """The last attempts whose saves failed on this rank."""

    def next(self) -> str:
        """A new attempt."""
        self._count += 1
        if self._count >> _COUNTER_BITS:
            self._session = 1 + secrets.randbelow((1 << _SESSION_BITS) - 1)
            self._count = 0
        return f"{self._session << _COUNTER_BITS | self._count:08x}"

    @staticmethod
    def new_run() -> str:
        """A new run's id."""
        return secrets.token_hex(8)


def is_stale(attempt: str, current: str) -> bool:
    """Whether a save that commits `current` may drop leftovers of `attempt` in its folder.

    Older tries of the same session are over, and so are those of other sessions; a newer one may
    be under way on another rank. The last number of a session drops nothing, since the next
    session may have begun.
    """
    if int(current[-3:], 16) == (1 << _COUNTER_BITS) - 1:
        return False
    return attempt[:5] != current[:5] or attempt < current


def is_earlier(attempt: str, current: str) -> bool:
    """Whether `attempt` was made before `current` by the same session.

    Then the coordinator has decided on it before it took up `current`. Of other sessions nothing is
    known; their writers may still work.
    """
    return attempt[:5] == current[:5] and attempt < current
