"""One caller at a time, in the process that made the object, until it is closed.

Knows threads and processes. Knows nothing of what is guarded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch_ckpt.errors import ConfigError


class Exclusive:
    """A lock that knows whether the present call interrupts another one on the same thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.closed = False
        self._lock = threading.RLock()
        self._owner = 0

    @property
    def interrupts(self) -> bool:
        """Whether this thread is inside a guarded call already, as in a signal handler."""
        return self._owner == threading.get_ident()

    @contextmanager
    def hold(self, *, closing: bool = False) -> Iterator[None]:
        """Keep other threads out.

        Raises:
            ConfigError: this is a forked child, or the object is closed.
        """
        if os.getpid() != self.pid:
            raise ConfigError(
                f"this checkpointer belongs to process {self.pid}; make one in this process"
            )
        if self.closed and not closing:
            raise ConfigError("this checkpointer is closed; make a new one")
        with self._lock:
            outer, self._owner = self._owner, threading.get_ident()
            try:
                yield
            finally:
                self._owner = outer
