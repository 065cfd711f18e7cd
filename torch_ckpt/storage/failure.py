"""Storage failures, said so that a reader knows the name, the cause and the next move.

Knows errno. Knows nothing of stores.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch_ckpt.errors import StorageError

_NEXT_MOVES = {
    errno.ENOSPC: "free space there, or keep fewer generations",
    errno.EDQUOT: "raise the quota there, or keep fewer generations",
    errno.EFBIG: "raise the file size limit (`ulimit -f`), or use another file system",
    errno.EROFS: "mount it writable, or choose another folder",
    errno.EACCES: "give this user the permission, or choose another folder",
    errno.EPERM: "give this user the permission, or choose another folder",
    errno.EIO: "the device or server failed: look at the kernel log before trusting it again",
    errno.ESTALE: "the file server lost it: mount it again",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the system's limit of open files",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "its folder does not exist, make that first",
    errno.EEXIST: "that name is taken, choose another or remove it",
    errno.ELOOP: "it is a symbolic link, which is never followed: put the file itself there",
    errno.ENOTDIR: "a file stands where a folder should be: move it away",
    errno.EISDIR: "a folder stands where a file should be: move it away",
}


def storage_error(action: str, where: str, error: Exception) -> StorageError:
    """The StorageError for a failed `action` (an infinitive) on the file or URL `where`."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        cause = str(error) or type(error).__name__
        return StorageError(f"cannot {action} {where}: {cause}")
    # A backend's own words say more than the text of the errno that it chose.
    cause = error.strerror if isinstance(error, OSError) and error.strerror else os.strerror(number)
    next_move = _NEXT_MOVES.get(number)
    return StorageError(
        number, f"cannot {action} {where}: {cause}" + (f"; {next_move}" if next_move else "")
    )


@contextmanager
def reported(action: str, where: str) -> Iterator[None]:
    """Turn an OSError into the StorageError that names `where`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(action, where, error) from error
