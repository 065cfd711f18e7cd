"""A local file written past the page cache where the file system allows it.

It has its name once its bytes are durable. Knows O_DIRECT and its alignment. Knows nothing of
blocks, digests or what names mean.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from contextlib import suppress

from torch_ckpt.errors import StorageError
from torch_ckpt.storage.durable import sync_folder, temporary_beside
from torch_ckpt.storage.failure import reported

logger = logging.getLogger(__name__)

_PAGE = 4096
"""Offsets and lengths of direct writes are multiples of this, and addresses should be."""


class DirectSink:
    """A new file of known size; any thread may write any part, each part once.

    `finish` gives it its name, which replaces what had that. If the size is not `exact`, it is the
    largest possible, and parts come in order.

    A write is direct when it covers whole pages (the file's end counts as one): pages are then
    never shared with a buffered write. The rest, and what the kernel refuses to write directly
    (an unaligned address, a file system without O_DIRECT), goes through the page cache.
    """

    def __init__(self, path: str, size: int, *, exact: bool = True) -> None:
        self._path, self._size, self._exact = path, size, exact
        # Its size is the final one from the start on, so only the name can tell a reader, or who
        # comes after a crash, that the bytes are not there yet.
        self._name_now = temporary_beside(path)
        self._given = 0
        self._done = False
        self._lock = threading.Lock()
        self._files: list[int] = []
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._buffered = os.open(self._name_now, flags | os.O_CREAT | os.O_EXCL, 0o666)
        self._files.append(self._buffered)
        try:
            # The size at once: direct writes that do not extend a file run side by side.
            os.ftruncate(self._buffered, size)
            self._direct = self._open_direct(flags)
        except BaseException:
            self.abandon()
            raise

    def write_at(self, offset: int, data: memoryview) -> None:
        data = data.cast("B")
        end = offset + len(data)
        if self._done or offset < 0 or end > self._size:
            raise StorageError(
                f"cannot write bytes {offset} to {end} of {self._path}: "
                + ("it is finished" if self._done else f"it has {self._size}")
            )
        with reported("write", self._path):
            if offset % _PAGE or (end % _PAGE and end != self._size):
                self._write_buffered(offset, data)
            else:
                whole = len(data) - len(data) % _PAGE
                self._write_direct(offset, data[:whole])
                self._write_tail(offset + whole, data[whole:])
        with self._lock:
            self._given += len(data)

    def finish(self) -> None:
        if self._exact and self._given != self._size:
            raise StorageError(
                f"{self._path} was given {self._given} of {self._size} bytes; save again"
            )
        with reported("finish", self._path):
            os.ftruncate(self._buffered, self._given)  # cuts off what pads the last page
            os.fsync(self._buffered)
            while self._files:
                os.close(self._files.pop())  # network file systems report late errors here
            os.replace(self._name_now, self._path)
            self._name_now = self._path
            sync_folder(os.path.dirname(self._path))
        self._done = True

    def abandon(self) -> None:
        """Remove the file unless it is finished; call it after the last `write_at` returned."""
        if self._done:
            return
        self._done = True
        while self._files:
            with suppress(OSError):
                os.close(self._files.pop())
        try:
            os.unlink(self._name_now)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("an abandoned file stays at %s: %s", self._name_now, error)

    def _open_direct(self, flags: int) -> int | None:
        direct = getattr(os, "O_DIRECT", None)  # Linux only
        if direct is None:
            return None
        try:
            file = os.open(self._name_now, flags | direct)
        except OSError as error:
            if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
                return None
            raise
        self._files.append(file)
        return file

    def _write_direct(self, offset: int, data: memoryview) -> None:
        while data and self._direct is not None:
            try:
                count = os.pwrite(self._direct, data, offset)
            except OSError as error:
                # This buffer or this file system cannot do it, which only trying tells.
                if error.errno != errno.EINVAL:
                    raise
                break
            offset, data = offset + count, data[count:]
        self._write_buffered(offset, data)

    def _write_tail(self, offset: int, data: memoryview) -> None:
        """Write less than a page at the end of the file, padded until `finish`."""
        if data:
            with mmap.mmap(-1, _PAGE) as page:  # page-aligned and zero
                page[: len(data)] = data
                with memoryview(page) as padded:
                    self._write_direct(offset, padded)

    def _write_buffered(self, offset: int, data: memoryview) -> None:
        while data:
            count = os.pwrite(self._buffered, data, offset)
            offset, data = offset + count, data[count:]
