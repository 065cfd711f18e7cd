"""Which names a store accepts.

Knows strings. Knows nothing of stores or of what the names mean.
"""

from __future__ import annotations

from torch_ckpt.errors import StorageError


def check_name(name: str, *, root: str) -> str:
    """Return `name` if it is relative, plain and stays under its root.

    Raises:
        StorageError: it is empty, absolute, holds NUL, or has an empty, `.` or `..` component.
    """
    if not name or "\0" in name or any(part in {"", ".", ".."} for part in name.split("/")):
        raise StorageError(
            f"{name!r} is not a name inside {root}; names are relative and have no '.' or '..'"
        )
    return name
