"""Any fsspec file system as a store: one request publishes a document, nothing is renamed.

Knows fsspec. Knows nothing of one backend in particular, of retries, or of what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec

from torch_ckpt.errors import ConfigError, ServerBusy, StorageError, UnexpectedFile
from torch_ckpt.storage.bucket import Bucket
from torch_ckpt.storage.failure import storage_error
from torch_ckpt.storage.names import check_name
from torch_ckpt.storage.parts import fill_sink
from torch_ckpt.storage.retry_after import pause_asked_by
from torch_ckpt.storage.store import Capabilities, Entry, Read, Sink

_REQUEST_BYTES = 16 << 20
_MAX_REQUESTS = 9_000
"""Object stores allow 10,000 parts in an upload."""


def open_fsspec(url: str, storage_options: dict[str, Any]) -> FsspecStore:
    """The store at an fsspec URL.

    Raises:
        ConfigError: the scheme is unknown, its package is missing, or it refuses an option.
    """
    # A cached instance may share a listing that never learns of other processes' writes.
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    options.update(storage_options)
    try:
        if url.lower().startswith(("s3://", "s3a://")):
            from torch_ckpt.storage.deadline import with_deadline

            options = with_deadline(options)
        fs, path = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        raise ConfigError(
            f"{url} needs a package that is not installed ({error}); install it, or choose a path"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{url} cannot be opened: {error}") from error
    return FsspecStore(fs, path, url)


class FsspecStore:
    """Generations under a prefix. A folder is there while a name in it is."""

    capabilities = Capabilities(files=False, random_access=False)

    def __init__(self, fs: fsspec.AbstractFileSystem, root: str, url: str) -> None:
        self._fs, self._root, self._url = fs, root.rstrip("/"), url.rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    def put(self, name: str, data: bytes) -> None:
        with _reported("write", self._where(name)):
            self._fs.pipe_file(self._path(name), bytes(data))  # some backends refuse other types

    def put_new(self, name: str, data: bytes) -> bool:
        data = bytes(data)
        # Looked at before and after: some servers ignore the condition and overwrite.
        if (found := self._found(name, len(data))) is not None:
            return found == data
        refused: Exception | None = None
        try:
            self._put_if_free(self._path(name), data)
        except Exception as error:  # every backend says in its own way that the name is taken
            refused = error
        if (found := self._found(name, len(data))) is not None:
            return found == data
        raise storage_error(
            "write", self._where(name), refused or OSError("it is gone after it was written")
        ) from refused

    def get(self, name: str, *, limit: int) -> bytes:
        data = self._range(name, 0, limit + 1)
        if len(data) > limit:
            raise UnexpectedFile(
                f"{self._where(name)} has more than the {limit} bytes that such a file may have; "
                "it was not written by torch-ckpt, or is damaged"
            )
        return data

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        target = target.cast("B")
        data = self._range(name, offset, offset + len(target))
        if len(data) > len(target):
            raise StorageError(
                f"cannot read {self._where(name)}: the server ignores byte ranges; use another one"
            )
        target[: len(data)] = data
        return len(data)

    def create(self, name: str, size: int, *, exact: bool = True) -> Sink:
        with _reported("create", self._where(name)):
            request_bytes = max(_REQUEST_BYTES, -(-size // _MAX_REQUESTS))
            file = self._fs.open(self._path(name), "wb", block_size=request_bytes)
        return StreamSink(self, file, name, size, exact=exact)

    def upload(self, name: str, size: int, read: Read, *, sha256: str | None = None) -> None:
        where = self._where(name)
        sink = self.create(name, size)
        try:
            fill_sink(sink, size, read, sha256=sha256, where=where, in_order=True)
            sink.finish()
        except BaseException:
            sink.abandon()
            raise
        with _reported("write", where):
            stored = self._fs.info(self._path(name))["size"]
        if stored != size:
            self.delete(name)
            raise StorageError(f"{where} has {stored} bytes after an upload of {size}; try again")

    def abort_uploads(self, folder: str, *, older_than_s: float = 0.0, of: str = "") -> int:
        prefix = f"{self._path(folder) if folder else self._root}/"
        if not hasattr(self._fs, "call_s3"):
            return 0  # elsewhere unfinished uploads cannot be listed, or end by themselves
        bucket, key = self._bucket(prefix)
        with _reported("abort uploads under", self._where(folder)):
            return bucket.abort_uploads(key, older_than_s, of)

    def pause_asked(self, *, writes: bool) -> float | None:
        """For how many seconds the server wants to be left alone, as one request to S3 says."""
        if not hasattr(self._fs, "call_s3"):
            return None
        bucket, key = self._bucket(self._root)
        return bucket.pause_asked(key, writes=writes)

    def link(self, source: str, name: str) -> None:
        with _reported(f"give the name {name!r} to", self._where(source), missing_is_fine=True):
            self._fs.cp_file(self._path(source), self._path(name))

    def make_folder(self, name: str) -> None:
        if name:
            self._path(name)  # refuses what a local folder would refuse

    def delete(self, name: str) -> None:
        with (
            suppress(FileNotFoundError),
            _reported("delete", self._where(name), missing_is_fine=True),
        ):
            self._fs.rm_file(self._path(name))

    def delete_many(self, names: Iterable[str]) -> None:
        names = list(names)
        paths = [self._path(name) for name in names]
        # Not `rm`: it takes names for patterns, and hides what the server refused to delete.
        if len(paths) > 1 and hasattr(self._fs, "call_s3"):
            with suppress(Exception):  # some servers have no such request
                bucket, _ = self._bucket(paths[0])
                bucket.delete([self._bucket(path)[1] for path in paths])
                return
        for name in names:
            self.delete(name)

    def _bucket(self, path: str) -> tuple[Bucket, str]:
        """The bucket of a path on S3, and the key in it."""
        bucket, _, key = path.partition("/")
        return Bucket(self._fs, bucket), key

    def delete_folder(self, name: str) -> bool:
        path = self._path(name)
        if self._listed(name):
            return False
        if hasattr(self._fs, "call_s3"):
            bucket, key = self._bucket(path)
            with _reported("remove the folder", self._where(name)):
                bucket.delete_marker(key)
        return True

    def folders(self) -> list[str]:
        return sorted(name for name, info in self._listed("").items() if _is_folder(info))

    def entries(self, folder: str) -> list[Entry]:
        listed = sorted(self._listed(folder).items())
        return [
            Entry(name=name, bytes=int(info["size"] or 0))
            for name, info in listed
            if not _is_folder(info)
        ]

    def _put_if_free(self, path: str, data: bytes) -> None:
        """Write where nothing is; backends that cannot make sure just write."""
        try:
            self._fs.pipe_file(path, data, mode="create")
        except (TypeError, ValueError, NotImplementedError):
            self._fs.pipe_file(path, data)

    def _found(self, name: str, length: int) -> bytes | None:
        """The first bytes of an object, one more than `length`; None if there is none."""
        try:
            return self._range(name, 0, length + 1)
        except FileNotFoundError:
            return None

    def _listed(self, folder: str) -> dict[str, dict[str, Any]]:
        """What is directly in a folder. Only `ls`: `walk` and `isfile` hide a server's errors."""
        path = self._path(folder) if folder else self._root
        try:
            with _reported("list", self._where(folder), missing_is_fine=True):
                found = self._fs.ls(path, detail=True, refresh=True)
        except FileNotFoundError:
            return {}
        # Some servers list the folder itself, as an object that marks it.
        inside = [info for info in found if info["name"].strip("/") != path.strip("/")]
        return {info["name"].rstrip("/").rpartition("/")[2]: info for info in inside}

    def _range(self, name: str, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`, or to the end of the object if that comes first."""
        path = self._path(name)
        if start == end:  # HTTP has no empty range: asking for it brings the whole object
            return b""
        try:
            with _reported("read", self._where(name), missing_is_fine=True):
                data: Any = self._fs.cat_file(path, start=start, end=end)
        except StorageError:
            # Object stores refuse a range that starts at or behind the end.
            with _reported("read", self._where(name), missing_is_fine=True):
                size = self._fs.info(path)["size"]
            if start < size:
                raise
            return b""
        return bytes(data)

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name, root=self._url)}"

    def _where(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url


class StreamSink:
    """An object being uploaded from its first byte to its last, by one thread."""

    def __init__(
        self, store: FsspecStore, file: Any, name: str, size: int, *, exact: bool = True
    ) -> None:
        self._store, self._file, self._name = store, file, name
        self._size, self._exact = size, exact
        self._where = f"{store.url}/{name}"
        self._given = 0
        self._done = False

    def write_at(self, offset: int, data: memoryview) -> None:
        data = data.cast("B")
        if self._done or offset != self._given or offset + len(data) > self._size:
            raise StorageError(
                f"cannot write {len(data)} bytes at {offset} of {self._where}: "
                f"{self._given} of its {self._size} bytes are written, and they go in order"
            )
        with _reported("write", self._where):
            self._file.write(data)
        self._given += len(data)

    def finish(self) -> None:
        if self._exact and self._given != self._size:
            raise StorageError(
                f"{self._where} was given {self._given} of {self._size} bytes; save again"
            )
        with _reported("finish", self._where):
            self._file.close()
        self._done = True

    def abandon(self) -> None:
        # Backends fail in their own ways here, and what stays is an object that nothing names.
        if self._done:
            return
        self._done = True
        with suppress(Exception):
            self._file.discard()
        # Closing would publish the truncated object, and an open file is closed when collected.
        with suppress(AttributeError):
            self._file.closed = True
        with suppress(StorageError):
            self._store.delete(self._name)


@contextmanager
def _reported(action: str, where: str, *, missing_is_fine: bool = False) -> Iterator[None]:
    """Turn whatever a backend raises into StorageError, or FileNotFoundError where that is fine."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # backends let their own client's exceptions out as well
        if missing_is_fine and isinstance(error, FileNotFoundError):
            raise FileNotFoundError(f"{where} does not exist") from error
        failure = storage_error(action, where, error)
        if (pause_s := pause_asked_by(error)) is not None:
            raise ServerBusy(str(failure), retry_after_s=pause_s) from error
        raise failure from error


def _is_folder(info: dict[str, Any]) -> bool:
    return info["type"] == "directory"
