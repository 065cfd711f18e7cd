"""A store that fails or stalls on demand, around a real one.

For tests alone. Every operation reaches the wrapped store unless a fault was ordered for it.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Iterable

from torch_ckpt.errors import StorageError
from torch_ckpt.storage.store import Capabilities, Entry, Read, Sink, Store

OPERATIONS = frozenset(
    {"put", "put_new", "get", "read", "create", "write", "finish", "abandon"}
    | {"upload", "abort_uploads", "link", "make_folder"}
    | {"delete", "delete_many", "delete_folder", "folders", "entries"}
)


class FaultyStore:
    """Wraps a store; `fail` and `block` order faults, `calls` tells what was asked, in order."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls: list[tuple[str, str]] = []
        self.waiting = threading.Event()
        """Set once a blocked operation has arrived."""
        self._counts: Counter[str] = Counter()
        self._faults: dict[tuple[str, int], Exception] = {}
        self._dead: dict[str, Exception] = {}
        self._blocked: frozenset[str] = frozenset()
        self._released = threading.Event()
        self._lock = threading.Lock()

    def fail(self, operation: str, *, nth: int | None = 1, error: Exception | None = None) -> None:
        """Make the nth call from now on fail, or every one if `nth` is None."""
        assert operation in OPERATIONS, operation
        error = error or StorageError(errno.EIO, f"injected: {operation} failed")
        with self._lock:
            if nth is None:
                self._dead[operation] = error
            else:
                self._faults[operation, self._counts[operation] + nth] = error

    def block(self, *operations: str) -> None:
        """Hold these operations, all of them if none is named, until `release`."""
        assert OPERATIONS.issuperset(operations), operations
        self._released.clear()
        self.waiting.clear()
        self._blocked = frozenset(operations) or OPERATIONS

    def release(self) -> None:
        """Let held operations go on, and forget every fault that was ordered."""
        with self._lock:
            self._blocked = frozenset()
            self._faults.clear()
            self._dead.clear()
        self._released.set()

    def meet(self, operation: str, name: str) -> None:
        """Record a call, then hold it or fail it as ordered."""
        with self._lock:
            self.calls.append((operation, name))
            self._counts[operation] += 1
            error = self._faults.pop((operation, self._counts[operation]), None)
            error = error or self._dead.get(operation)
            held = operation in self._blocked
        if held:
            self.waiting.set()
            self._released.wait()
        if error is not None:
            raise error

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def capabilities(self) -> Capabilities:
        return self.store.capabilities

    def put(self, name: str, data: bytes) -> None:
        self.meet("put", name)
        self.store.put(name, data)

    def put_new(self, name: str, data: bytes) -> bool:
        self.meet("put_new", name)
        return self.store.put_new(name, data)

    def get(self, name: str, *, limit: int) -> bytes:
        self.meet("get", name)
        return self.store.get(name, limit=limit)

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        self.meet("read", name)
        return self.store.read_into(name, offset, target)

    def create(self, name: str, size: int, *, exact: bool = True) -> Sink:
        self.meet("create", name)
        return FaultySink(self, self.store.create(name, size, exact=exact), name)

    def upload(self, name: str, size: int, read: Read, *, sha256: str | None = None) -> None:
        self.meet("upload", name)
        self.store.upload(name, size, read, sha256=sha256)

    def abort_uploads(self, folder: str, *, older_than_s: float = 0.0, of: str = "") -> int:
        self.meet("abort_uploads", folder)
        return self.store.abort_uploads(folder, older_than_s=older_than_s, of=of)

    def link(self, source: str, name: str) -> None:
        self.meet("link", name)
        self.store.link(source, name)

    def make_folder(self, name: str) -> None:
        self.meet("make_folder", name)
        self.store.make_folder(name)

    def delete(self, name: str) -> None:
        self.meet("delete", name)
        self.store.delete(name)

    def delete_many(self, names: Iterable[str]) -> None:
        names = list(names)
        for name in names:
            self.meet("delete_many", name)
        self.store.delete_many(names)

    def delete_folder(self, name: str) -> bool:
        self.meet("delete_folder", name)
        return self.store.delete_folder(name)

    def folders(self) -> list[str]:
        self.meet("folders", "")
        return self.store.folders()

    def entries(self, folder: str) -> list[Entry]:
        self.meet("entries", folder)
        return self.store.entries(folder)


class FaultySink:
    """The sink of a FaultyStore."""

    def __init__(self, store: FaultyStore, sink: Sink, name: str) -> None:
        self._store, self._sink, self._name = store, sink, name

    def write_at(self, offset: int, data: memoryview) -> None:
        self._store.meet("write", self._name)
        self._sink.write_at(offset, data)

    def finish(self) -> None:
        self._store.meet("finish", self._name)
        self._sink.finish()

    def abandon(self) -> None:
        self._store.meet("abandon", self._name)
        self._sink.abandon()
