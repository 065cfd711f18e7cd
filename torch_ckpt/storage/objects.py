"""Objects on S3, Google Cloud Storage and Azure through obstore, which moves bytes outside Python.

Knows requests and their order. Knows nothing of options and credentials, or of what the bytes
mean. Every request has a deadline and is tried again, with jitter, for a bounded time, both by
obstore, whose pauses grow up to 15 s whatever a `Retry-After` says. An unhurried caller has that
obeyed instead. A forked child must open its own store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import obstore

from torch_ckpt.errors import ConfigError, ServerBusy, StorageError, UnexpectedFile
from torch_ckpt.storage.clients import Clients, Untranslatable, translate
from torch_ckpt.storage.names import check_name
from torch_ckpt.storage.outgoing import PART_BYTES, Remembering, Shape, parts
from torch_ckpt.storage.refusals import (
    is_behind_the_end,
    is_broken_off,
    is_forgotten,
    is_missing,
    is_too_large,
    is_unanswered,
    refusal,
)
from torch_ckpt.storage.requests import TRIES, Requests, pause_before
from torch_ckpt.storage.store import Capabilities, Entry, Read, Sink, Store
from torch_ckpt.storage.stream import Stream

if TYPE_CHECKING:
    from torch_ckpt.storage.remote import FsspecStore

logger = logging.getLogger(__name__)

_DELETERS = 8
_COPY_PATIENCE = 10.0
"""Times the ordinary deadline: a server answers when it has copied, at some 100 MB/s."""
_ASKED_ONCE: dict[str, Any] = {
    "connect_timeout": 5,
    "read_timeout": 5,
    "retries": {"max_attempts": 0},
}
"""What botocore does with a request that is sent to see its answer."""


def open_objects(
    url: str, storage_options: dict[str, Any], *, unhurried: bool = False
) -> Store | None:
    """The store at a URL of a cloud; None where obstore cannot do what the options say.

    Raises:
        ConfigError: there are no credentials.
    """
    try:
        clients, prefix = translate(url, storage_options)
    except Untranslatable as reason:
        logger.info("%s goes through fsspec, which is slower: obstore cannot take %s", url, reason)
        return None
    try:
        return ObjectStore(url, clients, prefix, storage_options, unhurried=unhurried)
    except Exception as error:  # obstore refuses what it cannot use by errors of several classes
        raise ConfigError(str(refusal("open", url, error))) from None


class ObjectStore:
    """Generations under a prefix of a bucket. A folder is there while a name in it is."""

    capabilities = Capabilities(files=False, random_access=False)

    def __init__(
        self,
        url: str,
        clients: Clients,
        prefix: str,
        storage_options: dict[str, Any],
        *,
        unhurried: bool = False,
    ) -> None:
        self._url, self._clients, self._prefix = url.rstrip("/"), clients, prefix
        self._options = storage_options
        self._requests = Requests(self._url, clients, self._pause_asked if unhurried else None)
        self._asker: FsspecStore | None = None
        self._requests.client()

    @property
    def url(self) -> str:
        return self._url

    def put(self, name: str, data: bytes) -> None:
        key = self._key(name)
        with self._reported("write", name):
            self._requests.ask(obstore.put, key, data, use_multipart=False, writes=True)

    def put_new(self, name: str, data: bytes) -> bool:
        # Looked at first: some servers ignore the condition and overwrite.
        if (found := self._found(name, len(data))) is not None:
            return found == data
        options: dict[str, Any] = {"mode": "create", "use_multipart": False}
        for attempt in range(1, TRIES + 1):
            try:
                self._requests.ask(obstore.put, self._key(name), data, writes=True, **options)
                return True
            except ServerBusy:
                raise
            except Exception as error:
                # Taken, perhaps by us: the answer to an earlier request may have been lost.
                if (found := self._found(name, len(data))) is not None:
                    return found == data
                if attempt == TRIES or type(error).__name__.startswith(("Perm", "Unauth")):
                    raise refusal("write", self._where(name), error) from None
            pause_before(attempt)
        raise StorageError  # not reached

    def get(self, name: str, *, limit: int) -> bytes:
        key = self._key(name)
        with self._reported("read", name, missing_is_fine=True):
            size, data = self._requests.ask(_whole, key, limit, again_if=is_broken_off)
            if data is not None:
                return data
        raise UnexpectedFile(
            f"{self._where(name)} has {size} bytes, more than the {limit} that such a file may "
            "have; it was not written by torch-ckpt, or is damaged"
        )

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        target, done = target.cast("B"), 0
        key = self._key(name)
        if not target:
            self._size(name)  # a missing name is reported all the same
        while done < len(target):
            # One request for each piece, so that what comes in is in memory twice for one only.
            length = min(PART_BYTES, len(target) - done)
            start = offset + done
            try:
                data = self._requests.ask(
                    obstore.get_range,
                    key,
                    start=start,
                    length=length,
                    patience=2.0,
                    again_if=is_broken_off,
                )
            except Exception as error:
                if not is_behind_the_end(error):
                    self._raise("read", name, error, missing_is_fine=True)
                data = b""
            with memoryview(data) as view:
                target[done : done + len(view)] = view
            done += len(data)
            if len(data) < length:
                break
        return done

    def create(self, name: str, size: int, *, exact: bool = True) -> Sink:
        self._key(name)
        shape = Shape(size)
        return Stream(
            where=self._where(name),
            size=size,
            exact=exact,
            shape=shape,
            send=lambda bytes_in_parts: self._send(name, size, shape, bytes_in_parts, exact=exact),
        )

    def upload(self, name: str, size: int, read: Read, *, sha256: str | None = None) -> None:
        self._key(name)
        shape = Shape(size)
        tries = (None,) if shape.single(size) else self._requests.upload_tries()
        for retries in tries:
            source = parts(size, read, shape, sha256=sha256, where=self._where(name))
            try:
                self._send(name, size, shape, source, retries=retries)
                return
            except StorageError as error:
                if retries is tries[-1] or isinstance(error, ServerBusy):
                    raise
                self._requests.be_patient()
                logger.info("%s; it is sent again, each part with more patience", error)
            finally:
                source.close()

    def _send(
        self,
        name: str,
        size: int,
        shape: Shape,
        source: Iterator[memoryview],
        *,
        exact: bool = True,
        retries: int | None = None,
    ) -> None:
        """Store the parts that `source` brings, and see that all of them are there."""
        key, patience = self._key(name), 2.0 * shape.part_bytes / PART_BYTES
        source = Remembering(source)
        before = None
        try:
            if shape.single(size):
                data = next(source, b"")
                # Also this one is published only when its source says that it ends.
                if next(source, None) is not None:
                    raise StorageError(f"{self._where(name)} was given more than {size} bytes")
                ask = self._requests.ask
                ask(obstore.put, key, data, use_multipart=False, patience=patience, writes=True)
            else:
                before = self._tag(name)
                obstore.put(
                    self._requests.client(patience, retries=retries),
                    key,
                    source,
                    use_multipart=True,
                    chunk_size=shape.part_bytes,
                    max_concurrency=shape.concurrency,
                )
        except StorageError:
            raise
        except Exception as error:
            if source.failure is not None:
                raise source.failure from None
            # Also what the server answers when the answer that it had finished was lost.
            if not (is_forgotten(error) and self._tag(name) not in {None, before}):
                self._requests.heed(error, writes=True)
                raise refusal("write", self._where(name), error) from None
        size = size if exact else source.bytes
        if (stored := self._size(name)) != size:
            self.delete(name)
            raise StorageError(
                f"{self._where(name)} has {stored} bytes after an upload of {size}; try again"
            )

    def abort_uploads(self, folder: str, *, older_than_s: float = 0.0, of: str = "") -> int:
        if folder:
            check_name(folder, root=self._url)
        if self._clients.kind != "s3":
            return 0  # Azure drops them after a week; Google's need a lifecycle rule
        self._requests.insist()
        if (twin := self._twin()) is None:
            logger.warning(
                "multipart uploads that were cut stay under %s: listing them needs s3fs "
                "(`pip install torch-ckpt[s3]`), or a lifecycle rule of the bucket",
                self._where(folder),
            )
            return 0
        return twin.abort_uploads(folder, older_than_s=older_than_s, of=of)

    def link(self, source: str, name: str) -> None:
        here, there = self._key(source), self._key(name)
        try:
            self._requests.ask(obstore.copy, here, there, patience=_COPY_PATIENCE, writes=True)
        except Exception as error:
            if is_too_large(error) and (twin := self._twin()) is not None:
                twin.link(source, name)  # in parts, each copied by the server
                return
            action = f"give the name {name!r} to"
            self._raise(action, source, error, missing_is_fine=True)

    def make_folder(self, name: str) -> None:
        if name:
            self._key(name)  # refuses what a local folder would refuse

    def delete(self, name: str) -> None:
        key = self._key(name)
        try:
            self._requests.ask(obstore.delete, key, alone=True, writes=True, again_if=is_unanswered)
        except Exception as error:
            if not is_missing(error):
                self._raise("delete", name, error)

    def delete_many(self, names: Iterable[str]) -> None:
        names = list(names)
        keys = [self._key(name) for name in names]
        try:
            if len(keys) > 1:
                self._requests.ask(obstore.delete, keys, writes=True, again_if=is_unanswered)
                return
        except ServerBusy:
            raise
        except Exception as error:  # it fails as a whole for one that is missing
            logger.debug("deleting one by one under %s: %s", self._url, type(error).__name__)
        with ThreadPoolExecutor(_DELETERS) as pool:
            for _ in pool.map(self.delete, names):
                pass

    def delete_folder(self, name: str) -> bool:
        path, found = self._key(name), self._listed(name)
        if found["common_prefixes"] or any(item["path"] != path for item in found["objects"]):
            return False
        # What is left is an object that marks the folder itself, whose key ends in a slash, which
        # obstore cannot say. Where nothing else can either, an empty folder stays in the listing.
        if found["objects"] and self._clients.kind == "s3" and (twin := self._twin()) is not None:
            twin.delete_folder(name)
        return True

    def folders(self) -> list[str]:
        found = self._listed("")["common_prefixes"]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def entries(self, folder: str) -> list[Entry]:
        path = self._key(folder) if folder else self._prefix
        found = [
            Entry(name=item["path"].rpartition("/")[2], bytes=item["size"])
            for item in self._listed(folder)["objects"]
            if item["path"] != path  # an object that marks the folder itself
        ]
        return sorted(found, key=lambda entry: entry.name)

    def _listed(self, folder: str) -> Any:
        path = self._key(folder) if folder else self._prefix
        with self._reported("list", folder):
            ask = self._requests.ask
            return ask(obstore.list_with_delimiter, path or None, again_if=is_broken_off)

    def _size(self, name: str) -> int:
        with self._reported("read", name, missing_is_fine=True):
            return self._requests.ask(obstore.head, self._key(name))["size"]

    def _tag(self, name: str) -> str | None:
        """What tells this content of a name from another; None if there is none."""
        try:
            with self._reported("read", name, missing_is_fine=True):
                return self._requests.ask(obstore.head, self._key(name))["e_tag"]
        except FileNotFoundError:
            return None

    def _found(self, name: str, length: int) -> bytes | None:
        """The first bytes of an object, one more than `length`; None if there is none."""
        target = bytearray(length + 1)
        try:
            return bytes(target[: self.read_into(name, 0, memoryview(target))])
        except FileNotFoundError:
            return None

    def _pause_asked(self, writes: bool) -> float | None:
        if self._asker is None and self._clients.kind == "s3":
            self._asker = self._twin(**_ASKED_ONCE)
        return None if self._asker is None else self._asker.pause_asked(writes=writes)

    def _twin(self, **config: Any) -> FsspecStore | None:
        """The same place through fsspec, for what obstore cannot do; None without its package."""
        from torch_ckpt.storage.remote import open_fsspec

        # It sends no contents, so no checksum of contents, which its package may not have.
        options = {k: v for k, v in self._options.items() if k != "s3_additional_kwargs"}
        if config:
            options["config_kwargs"] = {**(options.get("config_kwargs") or {}), **config}
        try:
            return open_fsspec(self._url, options)
        except ConfigError:
            return None

    @contextmanager
    def _reported(self, action: str, name: str, *, missing_is_fine: bool = False) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._raise(action, name, error, missing_is_fine=missing_is_fine)

    def _raise(
        self, action: str, name: str, error: Exception, *, missing_is_fine: bool = False
    ) -> NoReturn:
        if isinstance(error, ServerBusy):
            raise error
        # Without the original, whose text may hold signed URLs.
        if missing_is_fine and is_missing(error):
            raise FileNotFoundError(f"{self._where(name)} does not exist") from None
        raise refusal(action, self._where(name), error) from None

    def _key(self, name: str) -> str:
        check_name(name, root=self._url)
        return f"{self._prefix}/{name}" if self._prefix else name

    def _where(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url


def _whole(client: Any, key: str, limit: int) -> tuple[int, bytes | None]:
    """The size of an object, and its bytes unless they are more than `limit`."""
    answer = obstore.get(client, key)
    size = answer.meta["size"]
    return size, bytes(answer.bytes()) if size <= limit else None
