"""What a forked child must let go of: it inherits descriptors and memory that are not its own.

DataLoader workers are forks of the trainer. Without this they would keep slabs and sockets alive
after the trainer died. Knows nothing of what it drops.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """Something that only the process that made it may use."""

    def drop_in_child(self) -> None:
        """Close descriptors and unmap memory; runs in the child right after the fork."""
        ...


_alive: weakref.WeakSet[Inherited] = weakref.WeakSet()


def drop_on_fork(thing: Inherited) -> None:
    """Have `thing.drop_in_child()` called in every forked child of this process."""
    _alive.add(thing)


def _after_in_child() -> None:
    for thing in list(_alive):
        thing.drop_in_child()
    _alive.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_in_child)
