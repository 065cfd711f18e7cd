"""Which shards a part needs, its own and borrowed ones, and whether a store has them.

One listing a folder tells. Knows stores, parts and names. Knows nothing of shards' contents.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache

from torch_ckpt.errors import FormatError, IntegrityError
from torch_ckpt.manifest.commit import read_manifest
from torch_ckpt.manifest.schema import Manifest, Part, StoredFile
from torch_ckpt.storage.store import Store


class Shards:
    """The shards in one store, as it is now: every folder is asked for once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.sizes = cache(self._sizes)
        """The files in a folder with their sizes."""
        self._attempt = cache(self._attempt_in)

    def lacking(self, folder: str, part: Part, only: Collection[str] | None = None) -> str | None:
        """Which shard of a part is not there, in words; None if all are (of `only`, if given).

        Raises:
            StorageError: storage did not answer, which says nothing about what is there.
        """
        for shard in part.files:
            if only is None or shard.name in only:
                there = self.sizes(folder)
                if there.get(shard.name) != shard.bytes:
                    return odd(shard.name, shard.bytes, there)
        for one in part.borrowed:
            if only is not None and one.name not in only:
                continue
            if self._attempt(one.folder) != one.attempt:
                return f"step {one.step}, on which it builds, is not there"
            there = self.sizes(one.folder)
            if there.get(one.name) != one.bytes:
                what = odd(one.name, one.bytes, there)
                return f"step {one.step}, on which it builds, is not whole: {what}"
        return None

    def _sizes(self, folder: str) -> dict[str, int]:
        return sizes_in(self._store, folder)

    def _attempt_in(self, folder: str) -> str | None:
        found = manifest_in(self._store, folder)
        return None if found is None else found.attempt


def sizes_in(store: Store, folder: str) -> dict[str, int]:
    """The files in a folder with their sizes, from one listing."""
    return {entry.name: entry.bytes for entry in store.entries(folder)}


def manifest_in(store: Store, folder: str) -> Manifest | None:
    """The manifest in a folder; None if there is none, or none that can be read."""
    try:
        return read_manifest(store, folder)
    except (FileNotFoundError, FormatError, IntegrityError):
        return None


def odd(name: str, size: int, there: Mapping[str, int]) -> str:
    """What is wrong with a file that is not there with its size."""
    if name not in there:
        return f"{name} is not there"
    return f"{name} has {there[name]} bytes instead of {size}"


def missing_document(parts: Collection[StoredFile], there: Mapping[str, int]) -> str | None:
    """Which part is not there, in words; None if all are."""
    wrong = (one for one in parts if there.get(one.name) != one.bytes)
    return next((odd(one.name, one.bytes, there) for one in wrong), None)
