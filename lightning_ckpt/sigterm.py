"""SIGTERM on any rank becomes one decision of all ranks, taken between two batches.

Lightning's own handler starts a collective inside the signal handler, wherever training happens to
be; unless the signal reaches all ranks at the same point, they hang until they are killed. With
more than one rank this handler takes its place: it notes the signal, and nothing else. Knows
signals and a trainer's strategy. Knows nothing of saves.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from lightning_ckpt import twins
from lightning_ckpt.private import Trainer, handlers_besides_lightnings


class Sigterm:
    """Watches for SIGTERM while a trainer of several ranks trains."""

    def __init__(self) -> None:
        self._received = False
        self._watching = False
        self._before: Any = None
        self._others: list[Any] = []

    def watch(self, trainer: Trainer) -> None:
        """Take the place of Lightning's handler; what the user had installed is still called."""
        self._received = False
        self._watching = trainer.world_size > 1
        if self._watching and threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            self._others = handlers_besides_lightnings(self._before)
            signal.signal(signal.SIGTERM, self._note)

    def raise_if_any(self, trainer: Trainer) -> None:
        """End training on all ranks, as Lightning does, if one of them got the signal; collective.

        Raises:
            SIGTERMException: Lightning's own.
        """
        if self._watching and trainer.strategy.reduce_boolean_decision(self._received, all=False):
            self._watching = False
            raise twins.sigterm_exception(trainer)

    def release(self) -> None:
        """Give Lightning its handler back, unless it has put another one in place itself."""
        self._watching = False
        if self._before is not None and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)
        self._before = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        for handler in self._others:
            handler(number, frame)
