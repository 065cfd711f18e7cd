"""A progress bar on stderr where that is a terminal; nothing elsewhere.

Knows counts of bytes. Knows nothing of what they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any


class Meter:
    """Shows how far work has come; one line for each thing that is worked on."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._bar: Any = None

    def __enter__(self) -> Meter:
        if sys.stderr.isatty():
            # Imported here: it takes as long as all the rest, and only terminals need it.
            from rich.console import Console
            from rich.markup import escape
            from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

            self._escape = escape
            columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
            bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar = self._stack.enter_context(bar)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def of(self, name: str) -> Callable[[int, int], None] | None:
        """What to call with bytes done and bytes in all."""
        if self._bar is None:
            return None
        task = self._bar.add_task(self._escape(name), total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def counting(self, name: str, total: int) -> Callable[[int], None] | None:
        """What to call with the bytes of each piece that is done."""
        if self._bar is None:
            return None
        task = self._bar.add_task(self._escape(name), total=total)
        return lambda count: self._bar.update(task, advance=count)
