"""Whether this system lets a writer outlive its trainer: anonymous memory that two processes hold.

Knows the operating system. Knows nothing of slabs or writers.
"""

from __future__ import annotations

import functools
import os
import sys


@functools.cache
def can_outlive() -> bool:
    """Whether slabs can be handed to a side process; asked once, since sandboxes may refuse."""
    if not sys.executable or not hasattr(os, "memfd_create"):
        return False
    try:
        os.close(os.memfd_create("torch-ckpt-probe"))
    except OSError:
        return False
    return True
