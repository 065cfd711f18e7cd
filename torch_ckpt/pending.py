"""What the caller holds of a save that goes on in the background.

Knows states and times. Knows nothing of how a save is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from torch_ckpt.errors import ConfigError, GenerationNotFound, NotArchived, SaveFailed
from torch_ckpt.generations.catalog import Generation

State = Literal["copying", "staged", "committed", "failed", "skipped"]


class PendingSave:
    """One save, from the moment `save` returned."""

    def __init__(self, *, step: int, folder: str, attempt: str) -> None:
        self.step, self.folder, self.attempt = step, folder, attempt
        self.blocked_s = 0.0
        """Seconds that training stood still for this save so far."""
        self.persist_s: float | None = None
        """Seconds from hand-over to commit; None before."""
        self.bytes = 0
        """Raw bytes of this rank's share."""
        self.copied = 0
        """Bytes that were copied for it: fewer where moments were coded on their own device."""
        self.anchors_next = False
        """Whether the writer may let the save after it lose what rules name; known at the commit.
        """
        self.archived: bool | None = None
        """Whether the archive has it; None as long as that is open."""
        self.unarchived: str | None = "this run has no archive"
        """Why it will never be in the archive; None if it may come there."""
        self.state: State = "copying"
        self.error: SaveFailed | None = None
        self.settle: Callable[[], None] = lambda: None
        """Completes the copy, so that waiting cannot deadlock with the fence."""
        self.reread: Callable[[], Generation] | None = None
        self._changed = threading.Condition()

    @property
    def done(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ("committed", "failed", "skipped")

    def wait(
        self,
        until: Literal["staged", "committed", "archived"] = "committed",
        timeout_s: float | None = None,
    ) -> Generation | None:
        """Block until the save is staged, committed or archived; the generation from then on.

        On a rank other than 0, committed means that this rank's share is durable and its vote
        given, and archived that this share is in the archive; there is no generation to return
        yet. Nor is there one that has been pruned since.

        Raises:
            SaveFailed: it failed; the previous generation stands.
            NotArchived: it is committed and will not come into the archive.
            TimeoutError: it is still running, and goes on.
        """
        if until not in ("staged", "committed", "archived"):
            raise ConfigError(f"until must be 'staged', 'committed' or 'archived', got {until!r}")
        self.settle()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._reached(until):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    state = "not archived yet" if self.state == "committed" else self.state
                    raise TimeoutError(f"the save of step {self.step} is {state}; it goes on")
                self._changed.wait(left)
        if self.error is not None:
            raise self.error
        if until == "archived" and not self.archived:
            raise NotArchived(step=self.step, reason=str(self.unarchived))
        if self.state == "committed" and self.reread is not None:
            with suppress(GenerationNotFound):
                return self.reread()
        return None

    def _reached(self, until: str) -> bool:
        if until == "archived" and self.state == "committed":
            return self.archived is not None or self.unarchived is not None
        return self.done or (until == "staged" and self.state == "staged")

    def is_archived(self, unarchived: str | None = None) -> None:
        """The archive has it, or never will; wakes whoever waits."""
        with self._changed:
            if self.archived is None:
                self.archived, self.unarchived = unarchived is None, unarchived
            self._changed.notify_all()

    def become(self, state: State, error: SaveFailed | None = None) -> None:
        """Move on; wakes whoever waits."""
        with self._changed:
            if not self.done:
                self.state, self.error = state, error
                if error is not None:
                    self.unarchived = f"it was not committed: {error.reason}"
            self._changed.notify_all()
