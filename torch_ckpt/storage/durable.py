"""The few steps that make a change of a local file system outlive a crash.

Knows files and folders. Knows nothing of names, stores or errors: OSError passes through.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress

_LINKS_UNSUPPORTED = {
    errno.EPERM,
    errno.EXDEV,
    errno.EMLINK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
}
_COPY_UNSUPPORTED = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_COPY_BYTES = 64 << 20
_TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp$")


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    except OSError as error:
        # Some network and FUSE file systems have no fsync for folders; their servers order names.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(folder)


def make_folders(path: str) -> None:
    """Make a folder and the parents it lacks, each durable in its own parent."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folders(parent)
    try:
        os.mkdir(path)
    except FileExistsError:  # another rank was faster, or a file is in the way
        if not os.path.isdir(path):
            raise
    sync_folder(parent)


def temporary_beside(path: str) -> str:
    """A name for what becomes `path` when it is whole: rename works within one volume only."""
    return f"{path}.{os.urandom(4).hex()}.tmp"


def is_temporary(name: str) -> bool:
    return _TEMPORARY.search(name) is not None


def replace_file(path: str, data: bytes) -> None:
    """Put `data` under `path` so that a reader, or a crash, sees all of it or what was before.

    If only the last step fails (making the name durable), the new file is in place all the same:
    whoever cleans up after the error deletes this document before what it names.
    """
    temporary = temporary_beside(path)
    try:
        _write_file(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(os.path.dirname(path))


def create_file(path: str, data: bytes) -> bool:
    """Put `data` under `path`, all of it at once, unless something has that name: then False."""
    temporary = temporary_beside(path)
    try:
        _write_file(temporary, data)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _LINKS_UNSUPPORTED:
                raise
            if not _create_without_links(path, data):
                return False
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    sync_folder(os.path.dirname(path))
    return True


def _create_without_links(path: str, data: bytes) -> bool:
    """The same where there are no hard links: a crash in between leaves a shorter file."""
    try:
        _write_file(path, data)
    except FileExistsError:
        return False
    return True


def _write_file(path: str, data: bytes) -> None:
    """Make a new file with its bytes durable, but not yet its name."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(file, memoryview(data))
        os.fsync(file)
    finally:
        os.close(file)


def write_all(file: int, data: memoryview) -> None:
    """Write every byte of `data` at the position of `file`."""
    while data:
        data = data[os.write(file, data) :]


def link_file(source: str, path: str) -> None:
    """Give a file a second name, by a copy inside the kernel where there are no hard links."""
    try:
        os.link(source, path, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _LINKS_UNSUPPORTED:
            raise
        _copy_file(source, path)
    sync_folder(os.path.dirname(path))


def _copy_file(source: str, path: str) -> None:
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    temporary = temporary_beside(path)
    origin = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        target = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _copy_bytes(origin, target, os.fstat(origin).st_size)
            os.fsync(target)
        finally:
            os.close(target)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(origin)


def _copy_bytes(origin: int, target: int, size: int) -> None:
    done = 0
    copy = getattr(os, "copy_file_range", None)  # Linux only
    while done < size:
        length = min(size - done, _COPY_BYTES)
        try:
            if copy is None:
                moved = os.sendfile(target, origin, done, length)
            else:
                moved = copy(origin, target, length, done, done)
        except OSError as error:
            if copy is None or error.errno not in _COPY_UNSUPPORTED:
                raise
            copy = None
            os.lseek(target, done, os.SEEK_SET)  # sendfile writes at the file's position
            continue
        if moved == 0:
            raise OSError(errno.EIO, "the source became shorter while it was copied")
        done += moved
