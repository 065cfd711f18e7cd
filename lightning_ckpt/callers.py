"""Who is asking: a signal handler, a trainer that runs, a strategy, or somebody else.

Lightning tells its checkpoint plugin none of it, so the call stack is read. An answer that a later
Lightning makes impossible errs towards "not running", which costs speed, never a checkpoint.
Knows frames. Knows nothing of checkpoints.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

_TRAINER_MODULES = frozenset(
    {"lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"}
)
_RUNNING = "_run_stage"
_READS_FOR_ITSELF = ("strategies.fsdp", "strategies.model_parallel")
"""Strategies that write a gathered state through the plugin and read it back without one."""


def inside_signal_handler() -> bool:
    """Whether a Python signal handler is on the stack of this thread."""
    if threading.current_thread() is not threading.main_thread():
        return False  # Python runs handlers in the main thread only
    handlers = {
        code
        for number in signal.valid_signals()
        if (code := _code_of(signal.getsignal(number))) is not None
    }
    return any(frame.f_code in handlers for frame in _frames())


def inside_running_trainer() -> bool:
    """Whether a trainer's own loops are on the stack of this thread."""
    return any(
        frame.f_code.co_name == _RUNNING and frame.f_globals.get("__name__") in _TRAINER_MODULES
        for frame in _frames()
    )


def inside_sharded_strategy() -> bool:
    """Whether a strategy that reads checkpoints past its plugin is saving one through it."""
    return any(
        frame.f_code.co_name == "save_checkpoint"
        and str(frame.f_globals.get("__name__")).endswith(_READS_FOR_ITSELF)
        for frame in _frames()
    )


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _code_of(handler: Callable[..., Any] | int | None) -> CodeType | None:
    """The code that runs when a handler is called; None for a default or a built-in one."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if handler is None or isinstance(handler, int) or handler is signal.default_int_handler:
        return None
    function: Any = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = vars(type(handler)).get("__call__")  # an instance that can be called
    return getattr(function, "__code__", None)
