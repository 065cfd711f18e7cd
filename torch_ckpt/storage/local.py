"""A folder of this host as a store: documents appear whole, everything is durable on return.

Knows the file system. Knows nothing of what the files hold. Follows no symbolic link out of its
root, and none at all in place of a file.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch_ckpt.errors import StorageError, UnexpectedFile
from torch_ckpt.storage.direct import DirectSink
from torch_ckpt.storage.durable import (
    create_file,
    is_temporary,
    link_file,
    make_folders,
    replace_file,
    sync_folder,
)
from torch_ckpt.storage.failure import reported, storage_error
from torch_ckpt.storage.lustre import Stripes, Striping
from torch_ckpt.storage.names import check_name
from torch_ckpt.storage.parts import fill_sink
from torch_ckpt.storage.store import Capabilities, Entry, Read, Sink

_MISSING = {errno.ENOENT, errno.ENOTDIR}
_AS_IT_GROWS = Striping()


class LocalStore:
    """Generations in a folder, which may not exist yet. Threads may share it."""

    capabilities = Capabilities(files=True, random_access=True)

    def __init__(self, root: str, striping: Striping = _AS_IT_GROWS) -> None:
        # Absolute at once: the writer opens the same root from another working directory.
        self._root = os.path.abspath(os.path.expanduser(root))
        self._stripes = Stripes(striping)

    @property
    def url(self) -> str:
        return self._root

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with reported("write", path):
            replace_file(path, data)

    def put_new(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        with reported("write", path):
            if create_file(path, data):
                return True
        try:
            return self.get(name, limit=len(data)) == data
        except UnexpectedFile:  # longer, or no file at all
            return False

    def get(self, name: str, *, limit: int) -> bytes:
        with self._opened(name) as (file, size):
            if size > limit:
                raise UnexpectedFile(
                    f"{self._path(name)} has {size} bytes, more than the {limit} that such a file "
                    "may have; it was not written by torch-ckpt, or is damaged"
                )
            data = bytearray(size)
            return bytes(data[: _read_all(file, 0, memoryview(data))])

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        # Opened per call on purpose: it costs 1 % of an 8 MiB read, while descriptors that are
        # kept hide a replaced file and hold the space of one that another process pruned.
        with self._opened(name) as (file, _):
            return _read_all(file, offset, target)

    def create(self, name: str, size: int, *, exact: bool = True) -> Sink:
        path = self._path(name)
        with reported("create", path):
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            return DirectSink(path, size, exact=exact)

    def upload(self, name: str, size: int, read: Read, *, sha256: str | None = None) -> None:
        path = self._path(name)
        with reported("create", path):
            sink = DirectSink(path, size)
        try:
            fill_sink(sink, size, read, sha256=sha256, where=path)
            sink.finish()
        except BaseException:
            sink.abandon()
            raise

    def abort_uploads(self, folder: str, *, older_than_s: float = 0.0, of: str = "") -> int:
        aborted = 0
        for entry in self._scan(folder):
            if entry.is_dir(follow_symlinks=False):
                if not folder:
                    aborted += self.abort_uploads(entry.name, older_than_s=older_than_s, of=of)
            elif of in entry.name and is_temporary(entry.name) and _older(entry, older_than_s):
                self.delete(f"{folder}/{entry.name}" if folder else entry.name)
                aborted += 1
        return aborted

    def link(self, source: str, name: str) -> None:
        with self._opened(source):  # refuses what is missing, a link, or not a file
            path = self._path(name)
            with reported(f"link {self._path(source)} to", path):
                link_file(self._path(source), path)

    def make_folder(self, name: str) -> None:
        path = self._folder(name)
        with reported("make the folder", path):
            make_folders(path)
        if name:  # a generation's; what else is in the root is not ours
            self._stripes.set_on(path)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with reported("delete", path):
            try:
                os.unlink(path)
            except OSError as error:
                if error.errno in _MISSING:
                    return
                raise
            # Durable before the caller goes on: a manifest must not outlive its shards.
            sync_folder(os.path.dirname(path))

    def delete_many(self, names: Iterable[str]) -> None:
        for name in names:
            self.delete(name)

    def delete_folder(self, name: str) -> bool:
        path = self._path(name)
        with reported("remove the folder", path):
            try:
                os.rmdir(path)
            except OSError as error:
                if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                    return False
                if error.errno == errno.ENOENT:
                    return True
                raise
            sync_folder(os.path.dirname(path))
        return True

    def folders(self) -> list[str]:
        return sorted(entry.name for entry in self._scan("") if entry.is_dir(follow_symlinks=False))

    def entries(self, folder: str) -> list[Entry]:
        found = []
        for entry in self._scan(folder):
            try:
                if entry.is_file(follow_symlinks=False):
                    size = entry.stat(follow_symlinks=False).st_size
                    found.append(Entry(name=entry.name, bytes=size))
            except FileNotFoundError:  # another process deleted it since the folder was read
                continue
            except OSError as error:
                raise storage_error("list", entry.path, error) from error
        return sorted(found, key=lambda entry: entry.name)

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        path = self._folder(folder)
        with reported("list", path):
            try:
                with os.scandir(path) as entries:
                    return list(entries)
            except OSError as error:
                # A file in place of the root is a mistake, and no root without generations.
                if error.errno == errno.ENOENT or (folder and error.errno == errno.ENOTDIR):
                    return []
                raise

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        """A descriptor and the size of an existing file; the body only reads it."""
        path = self._path(name)
        # Without O_NONBLOCK a planted pipe would make the open wait for ever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(path, flags)
        except OSError as error:
            if error.errno in _MISSING:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
            refusal = storage_error("read", path, error)
            if error.errno == errno.ELOOP:
                raise UnexpectedFile(*refusal.args) from error
            raise refusal from error
        try:
            with reported("read", path):
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise UnexpectedFile(f"{path} is not a regular file; move it away")
                yield file, status.st_size
        finally:
            os.close(file)

    def _folder(self, name: str) -> str:
        """The path of a folder, the root for an empty name."""
        return self._inside(check_name(name, root=self._root).split("/") if name else [])

    def _path(self, name: str) -> str:
        """The path of a file, or of a folder that is itself changed."""
        *folders, last = check_name(name, root=self._root).split("/")
        return os.path.join(self._inside(folders), last)

    def _inside(self, folders: list[str]) -> str:
        """The path of nested folders; a link among them must stay under the root."""
        path = self._root
        for folder in folders:
            path = os.path.join(path, folder)
            if os.path.islink(path):
                root = os.path.realpath(self._root)
                if os.path.commonpath([root, os.path.realpath(path)]) != root:
                    raise StorageError(
                        f"{path} is a symbolic link that leaves {self._root}; "
                        "put the folder itself there"
                    )
        return path


def _read_all(file: int, offset: int, target: memoryview) -> int:
    """Fill `target` as far as the file goes; a signal or the kernel may cut a read short."""
    target, done = target.cast("B"), 0
    while done < len(target):
        count = os.preadv(file, [target[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _older(entry: os.DirEntry[str], age_s: float) -> bool:
    try:
        return age_s <= 0 or time.time() - entry.stat(follow_symlinks=False).st_mtime > age_s
    except FileNotFoundError:  # it was finished or removed since the folder was read
        return False
