"""How fast bytes may be sent: a token bucket.

Knows rates and clocks. Knows nothing of stores.
"""

from __future__ import annotations

import threading
import time


class TokenBucket:
    """Bytes a second, shared by threads; a burst of one second is let through at once."""

    def __init__(self, rate: float | None) -> None:
        """`rate` is bytes a second; None is no limit."""
        self._rate = rate
        self._level = rate or 0.0
        self._at = time.monotonic()
        self._lock = threading.Lock()

    def delay(self, count: int) -> float:
        """Book `count` bytes; the seconds that the caller has to wait before it sends them."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._level = min(self._rate, self._level + (now - self._at) * self._rate)
            self._at = now
            self._level -= count
            return max(0.0, -self._level / self._rate)
