"""SIGTERM on any rank becomes one decision of all ranks, taken between two steps.

Takes the place of `enable_jit_checkpoint`'s own handler, which waits three seconds, decides on each
rank alone, and may save between a forward pass and its step, which no resume could go on from
exactly. Knows signals and process groups. Knows nothing of saves.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

SIGTERM_CODE = 128 + 15


class Stop:
    """Watches for SIGTERM while a Trainer trains."""

    def __init__(self) -> None:
        self.received = False
        """Whether this rank got the signal."""
        self.decided = False
        """Whether all ranks know that one did."""
        self._before: Any = None
        self._watching = False
        self._group: Any = None
        self._jit: list[Any] = []

    @property
    def graceful(self) -> bool:
        """Whether the user asked that training should then end as if it had been done."""
        return bool(self._jit)

    def watch(self, trainer: Any) -> None:
        """Begin; a handler that the user had installed is still called."""
        callbacks = trainer.callback_handler.callbacks
        self._jit = [one for one in callbacks if getattr(one, "jit_manager", None) is not None]
        for one in self._jit:
            one.jit_manager.execute_jit_checkpoint = self.note
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._handle)
            self._watching = True

    def join(self) -> None:
        """Let the ranks agree from now on; all of them call it."""
        if self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            # On the host: training's own group would have it wait for the device at every step.
            self._group = dist.new_group(backend="gloo")

    def note(self) -> None:
        """It is to end soon."""
        self.received = True

    def decide(self) -> bool:
        """Whether a rank got the signal; all ranks call it at the same step."""
        if self._group is None:
            self.decided = self.decided or self.received
        elif not self.decided:
            seen = torch.tensor(int(self.received))
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._group)
            self.decided = bool(seen.item())
        return self.decided

    def release(self) -> None:
        """Give back the handler that was there, unless another one came meanwhile."""
        if self._watching and signal.getsignal(signal.SIGTERM) == self._handle:
            # None: it came from C, and cannot be given back.
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        self._watching, self._before = False, None
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.note()
        if callable(self._before) and not self._is_jit(self._before):
            self._before(number, frame)

    def _is_jit(self, handler: Any) -> bool:
        return any(getattr(handler, "__self__", None) is one.jit_manager for one in self._jit)
