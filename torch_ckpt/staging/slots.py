"""The slabs of a rank and who uses them: free, being copied into, or with the writer.

Knows slabs and waiting. Knows nothing of tensors or jobs.
"""

from __future__ import annotations

import logging
import math
import threading
import time

from torch_ckpt.staging.slab import Slab

logger = logging.getLogger(__name__)

_REMIND_S = 60.0
_LATE_S = 0.05


class Slots:
    """A fixed number of slabs, each free or taken."""

    def __init__(self, count: int) -> None:
        self.slabs = [Slab(number) for number in range(count)]
        self._free = set(range(count))
        self._changed = threading.Condition()
        self._late = False

    def all_taken(self) -> bool:
        """Whether `take` would wait; a save that is then left out counts as one that waited."""
        self._late = self._late or not self._free
        return not self._free

    @property
    def late(self) -> bool:
        """What `was_late` will say."""
        return self._late

    def was_late(self) -> bool:
        """Whether a save had to wait for storage, or was left out, since this was last asked."""
        late, self._late = self._late, False
        return late

    def take(self) -> Slab:
        """A free slab, waiting for one."""
        with self._changed:
            self._await(math.inf)
            return self._pop()

    def take_within(self, timeout_s: float) -> Slab | None:
        """A free slab; None if there is none in time."""
        with self._changed:
            return self._pop() if self._await(timeout_s) else None

    def _pop(self) -> Slab:
        number = min(self._free)
        self._free.discard(number)
        return self.slabs[number]

    def _await(self, timeout_s: float) -> bool:
        """Wait for a free slab; whether there is one."""
        if self._free:
            return True  # not late, however slow this machine is
        began, reminded = time.monotonic(), 0.0
        while not self._free:
            waited = time.monotonic() - began
            if waited >= timeout_s:
                return False
            if waited - reminded >= _REMIND_S:
                reminded = waited
                logger.warning(
                    "training has waited %.0f s for storage: all slabs are still being "
                    'written; save less often or use on_busy="skip"',
                    waited,
                )
            self._changed.wait(min(1.0, timeout_s - waited))
        self._late = self._late or time.monotonic() - began > _LATE_S
        return True

    def release(self, number: int) -> None:
        """The slab may be written again."""
        with self._changed:
            self._free.add(number)
            self._changed.notify_all()

    def close(self) -> None:
        """Give all memory back."""
        for slab in self.slabs:
            slab.close()
