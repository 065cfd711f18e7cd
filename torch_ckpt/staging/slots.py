"""The slabs of a rank and who uses them: free, being copied into, or with the writer.

Knows slabs and waiting. Knows nothing of tensors or jobs.
"""

from __future__ import annotations

import logging
import threading
import time

from torch_ckpt.staging.slab import Slab

logger = logging.getLogger(__name__)

_REMIND_S = 60.0


class Slots:
    """A fixed number of slabs, each free or taken."""

    def __init__(self, count: int) -> None:
        self.slabs = [Slab(number) for number in range(count)]
        self._free = set(range(count))
        self._changed = threading.Condition()

    @property
    def any_free(self) -> bool:
        """Whether `take` would not wait."""
        return bool(self._free)

    def take(self) -> Slab:
        """A free slab, waiting for one."""
        began, reminded = time.monotonic(), 0.0
        with self._changed:
            while not self._free:
                self._changed.wait(1.0)
                waited = time.monotonic() - began
                if waited - reminded >= _REMIND_S:
                    reminded = waited
                    logger.warning(
                        "training has waited %.0f s for storage: all slabs are still being "
                        'written; save less often or use on_busy="skip"',
                        waited,
                    )
            number = min(self._free)
            self._free.discard(number)
        return self.slabs[number]

    def release(self, number: int) -> None:
        """The slab may be written again."""
        with self._changed:
            self._free.add(number)
            self._changed.notify_all()

    def close(self) -> None:
        """Give all memory back."""
        for slab in self.slabs:
            slab.close()
