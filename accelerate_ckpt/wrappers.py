"""Models without the wrappers that a process group or a compiler puts around them.

Knows the names of wrappers. Knows nothing of Accelerate.
"""

from __future__ import annotations

from typing import Any


def unwrapped(model: Any) -> Any:
    """A model without the wrappers of a process group or a compiler."""
    while True:
        kinds = {kind.__name__ for kind in type(model).__mro__}
        if "DistributedDataParallel" in kinds:
            model = model.module
        elif "OptimizedModule" in kinds:
            model = model._orig_mod
        else:
            return model
