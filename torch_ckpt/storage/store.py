"""Bytes by name: what the engine asks of a place that holds generations.

Names are `/`-separated and relative to the store's root. Knows nothing of documents, ranks or
tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch_ckpt.storage.spelling import kind_of, local_path

Read: TypeAlias = Callable[[int, memoryview], int]
"""`read(offset, target)` fills `target` from `offset` of some source and returns the bytes read,
fewer only at the end; any thread may call it. `partial(store.read_into, name)` is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a store can do; callers ask this, never for its class."""

    files: bool
    """Names are files of this host's file system: folders exist, names can be linked."""
    random_access: bool
    """A sink takes writes at any offset and from several threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One name in a store."""

    name: str
    bytes: int


class Sink(Protocol):
    """A file being written; it has its name once finished, and counts once a part names it."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data`; ascending and without gaps where access is not random."""
        ...

    def finish(self) -> None:
        """Make every byte durable. Nothing may be written afterwards."""
        ...

    def abandon(self) -> None:
        """Drop what was written, as far as the store lets us; never raises StorageError."""
        ...


class Store(Protocol):
    """A place for generations. Errors are StorageError, or FileNotFoundError for a missing name."""

    @property
    def url(self) -> str:
        """The root, as a user would write it."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def put(self, name: str, data: bytes) -> None:
        """Publish a small document: durable and whole, or not there; replaces what was there."""
        ...

    def put_new(self, name: str, data: bytes) -> bool:
        """Publish a small document unless the name is taken; False if it holds other bytes.

        The answer to a request that did its work can be lost, so a name that holds exactly `data`
        counts as ours: `data` carries something that nobody else writes. Atomic where the store
        has such an operation; a server that ignores it gives the name to the last of those who
        ask at the same moment.
        """
        ...

    def get(self, name: str, *, limit: int) -> bytes:
        """All bytes of `name`.

        Raises:
            FileNotFoundError: there is no such name.
            StorageError: it is longer than `limit`, is a link out of the root, or cannot be read.
        """
        ...

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        """Fill `target` from `offset` on; return the bytes read, fewer only at the end of file."""
        ...

    def create(self, name: str, size: int, *, exact: bool = True) -> Sink:
        """Begin a file of `size` bytes under a name that is not in use.

        If not `exact`, it has at most so many, at least one, is written in order, and ends where
        the last write did.
        """
        ...

    def upload(self, name: str, size: int, read: Read, *, sha256: str | None = None) -> None:
        """Store `size` bytes that `read` brings, whole or not at all; replaces what was there.

        Reads and writes parts side by side, in a bounded amount of memory. What `read` raises
        comes out unchanged, and nothing is left behind. With `sha256` (hexadecimal, of all
        bytes) the parts are read in order, and bytes of another digest are never published.

        Raises:
            StorageError: the store refused, the source was shorter or had another digest, or
                the store shows another size afterwards.
        """
        ...

    def abort_uploads(self, folder: str, *, older_than_s: float = 0.0, of: str = "") -> int:
        """Remove what killed uploads left under a folder, and return how many those were.

        Uploads that still run are not told apart but by their age, so the caller knows that there
        are none, or says how old is old enough, or that only files are meant in whose names `of`
        is. The empty name is the whole root.
        """
        ...

    def link(self, source: str, name: str) -> None:
        """Give the bytes of `source` a second name without moving them through this process."""
        ...

    def make_folder(self, name: str) -> None:
        """Make a folder durable where folders exist; nothing elsewhere. It may exist already."""
        ...

    def delete(self, name: str) -> None:
        """Remove one name; one that is not there is fine."""
        ...

    def delete_many(self, names: Iterable[str]) -> None:
        """Remove names in any order, with few requests; on an error some may be left."""
        ...

    def delete_folder(self, name: str) -> bool:
        """Remove a folder if it is empty; False if something is left in it."""
        ...

    def folders(self) -> list[str]:
        """The folders directly under the root, sorted; links to folders are not among them."""
        ...

    def entries(self, folder: str) -> list[Entry]:
        """The files directly in a folder, sorted by name; an empty list if it does not exist."""
        ...


_CLOUDS = frozenset({"s3", "gs", "az"})
"""Where bytes go through obstore, if it is installed."""


def open_store(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    unhurried: bool = False,
) -> Store:
    """The store at a path or an fsspec URL.

    An unhurried caller gets ServerBusy as soon as a server asks to be left alone for a while, and
    for as long, where others have a request repeated for some minutes whatever the server asks.

    Of a path, the options are `stripe_count` and `stripe_size`, which matter on Lustre alone.

    Raises:
        ConfigError: the scheme is unknown, its package is missing, or an option cannot be used.
    """
    # Imported here: the stores need the words above, and a local path must not pay for fsspec,
    # whose import takes longer than the rest of the writer's start.
    if (path := local_path(url := os.fspath(url))) is None:
        from torch_ckpt.storage.remote import open_fsspec

        if kind_of(url) in _CLOUDS and _has_obstore():
            from torch_ckpt.storage.objects import open_objects

            options = dict(storage_options or {})
            if (store := open_objects(url, options, unhurried=unhurried)) is not None:
                return store
        return open_fsspec(url, dict(storage_options or {}))
    from torch_ckpt.storage.local import LocalStore
    from torch_ckpt.storage.lustre import striping_from

    return LocalStore(path, striping_from(url, storage_options))


def open_beside(
    url: str | os.PathLike[str], root: str, storage_options: Mapping[str, Any] | None
) -> Store:
    """The store at a path or URL, with the options of `root` if it is a place of the same kind.

    Options of another kind of place would be refused there, or tell it somebody else's password.

    Raises:
        ConfigError: as `open_store`.
    """
    return open_store(url, storage_options if kind_of(os.fspath(url)) == kind_of(root) else None)


def _has_obstore() -> bool:
    import importlib.util

    return importlib.util.find_spec("obstore") is not None
