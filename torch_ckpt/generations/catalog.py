"""What is in a run's root: committed generations, damaged ones, and how one is deleted.

A generation exists if and only if its manifest does. What storage refuses to say is an error,
never absence. Knows stores and documents. Knows nothing of which generations are worth keeping.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch_ckpt.errors import FormatError, GenerationNotFound, IntegrityError, StorageError
from torch_ckpt.generations.index import FRESH, read_index
from torch_ckpt.manifest.commit import (
    MANIFEST_LIMIT_BYTES,
    read_manifest,
    read_part,
    write_latest,
)
from torch_ckpt.manifest.layout import LATEST, MANIFEST, NOTE_LIMIT_BYTES, attempt_of, shard_name
from torch_ckpt.manifest.schema import Manifest, Summary
from torch_ckpt.storage.store import Store

Unusable = (FormatError, IntegrityError)
_READERS = 16
"""Manifests that are read at once from a remote root."""

SET_APART = {"damaged": "quarantined", "aside": "set aside"}
"""Tags of generations that nothing chooses by itself, and what people call these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One committed generation, as its manifest describes it."""

    folder: str
    url: str
    step: int
    manifest: Manifest
    indexed: Summary | None = None
    """Set where the index described it: `manifest.parts` is empty then, and the rest may be out
    of date. Whoever acts on it reads its manifest first (`Catalog.whole`)."""

    @property
    def parts_bytes(self) -> int:
        """Stored bytes of the parts, which are documents."""
        if self.indexed is not None:
            return self.indexed.parts_bytes
        return sum(part.bytes for part in self.manifest.parts)

    @property
    def stored_bytes(self) -> int:
        """Bytes of shards and parts."""
        return self.manifest.bytes + self.parts_bytes

    @property
    def tags(self) -> Mapping[str, str]:
        """Tag to reason."""
        return self.manifest.tags

    @property
    def set_apart(self) -> bool:
        """Whether it is quarantined or set aside, so that only a person may choose it."""
        return bool(self.tags.keys() & SET_APART.keys())

    @property
    def id(self) -> tuple[int, str]:
        """Step and attempt: what a child names as its parent."""
        return self.step, self.manifest.attempt


def newest_first(generation: Generation) -> tuple[int, str]:
    """The order of generations everywhere: by step, then by name; clocks are never asked."""
    return -generation.step, generation.folder


class Catalog:
    """The generations under one root. Holds no state: every call asks storage again."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def committed(self) -> list[Generation]:
        """Every generation whose manifest can be read, newest step first.

        Raises:
            StorageError: storage did not answer, which says nothing about what is there.
        """
        return self.scan()[0]

    def damaged(self) -> list[tuple[str, str]]:
        """Folders with a manifest that cannot be read, and why."""
        return self.scan()[1]

    def scan(
        self, *, reread: Collection[str] = ()
    ) -> tuple[list[Generation], list[tuple[str, str]]]:
        """What `committed` and `damaged` return, from one look at storage.

        In a remote root the index stands in for manifests of older generations, but for those in
        the folders `reread`, and other manifests are read side by side.
        """
        committed, damaged, _ = self.everything(reread=reread)
        return committed, damaged

    def everything(
        self, *, reread: Collection[str] = ()
    ) -> tuple[list[Generation], list[tuple[str, str]], list[str]]:
        """What `scan` returns, and the folders that have no manifest."""
        folders = self.store.folders()
        known: dict[str, Summary] = {}
        if not self.store.capabilities.files and len(folders) > FRESH:
            known = read_index(self.store)
        there = [known[folder] for folder in folders if folder in known]
        there.sort(key=lambda one: (-one.manifest.step, one.folder))
        unread = {one.folder: one for one in there[FRESH:] if one.folder not in reread}
        committed = [self._indexed(one) for one in unread.values()]
        damaged, bare = [], []
        read = [one for one in folders if one not in unread]
        for folder, found in zip(read, self._read_all(read), strict=True):
            if isinstance(found, Generation):
                committed.append(found)
            elif found is not None:
                damaged.append(found)
            else:
                bare.append(folder)
        return sorted(committed, key=newest_first), damaged, bare

    def read(self, folders: Collection[str]) -> dict[str, Generation]:
        """The generations in these folders as their manifests describe them, by folder."""
        found = self._read_all(sorted(folders))
        return {one.folder: one for one in found if isinstance(one, Generation)}

    def whole(self, generation: Generation) -> Generation:
        """The same generation as its manifest describes it, read again if an index spoke for it.

        Raises:
            GenerationNotFound: it is not there any more, or another one is in its folder.
        """
        if generation.indexed is None:
            return generation
        try:
            found = self._read(generation.folder)
        except FileNotFoundError as error:
            raise GenerationNotFound(f"{generation.url} is not there any more") from error
        if found.id != generation.id:
            raise GenerationNotFound(
                f"{generation.url} was replaced: it holds step {found.step}, "
                f"attempt {found.manifest.attempt}"
            )
        return found

    def find(self, *, step: int | None = None, folder: str | None = None) -> Generation:
        """The generation of a step or in a folder; the newest one if neither is given.

        Raises:
            GenerationNotFound: there is none; the message says what there is nearby.
        """
        if folder is not None:
            try:
                found = self._read(folder)
            except FileNotFoundError as error:
                raise self._not_found(f"no generation in {folder!r}", step) from error
            if step is not None and found.step != step:
                raise GenerationNotFound(
                    f"{found.url} holds step {found.step}, not {step}; leave one of the two out"
                )
            return found
        there = [one for one in self.committed() if step is None or one.step == step]
        if there:
            best = min(there, key=lambda one: (-one.step, one.set_apart, one.folder))
            return best if best.indexed is None else self.find(step=step, folder=best.folder)
        what = "no generation" if step is None else f"no generation of step {step}"
        raise self._not_found(what, step)

    def delete(self, generation: Generation) -> None:
        """Remove a generation: the manifest, then the files it names, then its empty folder.

        A file that neither manifest nor parts name is never touched, and neither is anything of
        another generation that was committed in the same folder meanwhile. Shards are names: one
        that another generation links to stays there. Where the root has an index, `index.forget`
        comes first.
        """
        folder, store = generation.folder, self.store
        try:  # only its manifest says which files are its own
            generation = self.whole(generation)
        except GenerationNotFound:
            return
        names = self._named(folder, generation.manifest)
        spared: set[str] = set()
        try:
            current = read_manifest(store, folder)
        except (FileNotFoundError, *Unusable):
            current = None
        if current is not None and current.attempt != generation.manifest.attempt:
            spared = self._named(folder, current)
        else:
            # First: without it the generation no longer exists, so a crash from here on leaves
            # litter, never a generation that lacks files.
            store.delete(f"{folder}/{MANIFEST}")
            self._repair_latest(folder)
        doomed = [f"{folder}/{name}" for name in sorted(names - spared)]
        if store.capabilities.files:
            for name in doomed:
                store.delete(name)
        else:
            store.delete_many(doomed)
        store.delete_folder(folder)

    def _read(self, folder: str) -> Generation:
        manifest = read_manifest(self.store, folder)
        return Generation(
            folder=folder,
            url=f"{self.store.url}/{folder}",
            step=manifest.step,
            manifest=manifest,
        )

    def _indexed(self, known: Summary) -> Generation:
        return Generation(
            folder=known.folder,
            url=f"{self.store.url}/{known.folder}",
            step=known.manifest.step,
            manifest=known.manifest,
            indexed=known,
        )

    def _read_all(self, folders: Sequence[str]) -> list[Generation | tuple[str, str] | None]:
        """For each folder its generation, or what is damaged and why, or None."""
        if self.store.capabilities.files or len(folders) < 2:
            return [self._look(folder) for folder in folders]
        from concurrent.futures import ThreadPoolExecutor  # local roots do not wait for it

        pool = ThreadPoolExecutor(min(len(folders), _READERS), thread_name_prefix="ckpt-catalog")
        try:
            return list(pool.map(self._look, folders))
        finally:
            pool.shutdown(cancel_futures=True)  # a server that fails is not asked 10,000 times

    def _look(self, folder: str) -> Generation | tuple[str, str] | None:
        try:
            return self._read(folder)
        except FileNotFoundError:
            return None  # not committed, or deleted since it was listed
        except Unusable as error:
            return folder, str(error)
        except StorageError as error:
            reason = self._planted(folder)
            if reason is None:
                raise
            return folder, f"{reason} ({error})"

    def _planted(self, folder: str) -> str | None:
        """Why something called manifest.json is not one; None if storage itself is at fault."""
        sizes = {entry.name: entry.bytes for entry in self.store.entries(folder)}
        if MANIFEST not in sizes:
            return f"{MANIFEST} is not a regular file"
        if sizes[MANIFEST] > MANIFEST_LIMIT_BYTES:
            return f"{MANIFEST} has {sizes[MANIFEST]} bytes, which no manifest has"
        return None

    def _named(self, folder: str, manifest: Manifest) -> set[str]:
        """Every file that a generation consists of, but for the manifest.

        Where a part cannot be read, its own name still says what its shard was called.
        """
        names = {stored.name for stored in manifest.parts}
        for stored in manifest.parts:
            try:
                part = read_part(self.store, folder, stored)
            except (FileNotFoundError, *Unusable):
                names |= _shards_beside(stored.name)
            else:
                names |= {shard.name for shard in part.files}
        return names

    def _repair_latest(self, folder: str) -> None:
        try:
            latest = self.store.get(LATEST, limit=NOTE_LIMIT_BYTES)
        except FileNotFoundError:
            return
        if latest.decode("utf-8", "surrogateescape").strip() != folder:
            return
        for generation in self.committed():
            if not generation.set_apart:
                write_latest(self.store, generation.folder)
                return
        self.store.delete(LATEST)

    def _not_found(self, what: str, step: int | None) -> GenerationNotFound:
        committed, damaged = self.scan()
        near = sorted(committed, key=lambda g: (abs(g.step - (step or g.step)), -g.step))[:5]
        listed = ", ".join(f"{g.step} ({g.folder})" for g in sorted(near, key=newest_first))
        there = f"there is step {listed}" if listed else "nothing is committed there"
        if len(committed) > len(near):
            there += f" and {len(committed) - len(near)} more"
        if damaged:
            there += f"; damaged: {', '.join(name for name, _ in damaged[:3])}"
        return GenerationNotFound(f"{what} in {self.store.url}; {there}")


def _shards_beside(part: str) -> set[str]:
    attempt, rank = attempt_of(part), part[len("rank-") :].partition(".")[0]
    if attempt is None or not rank.isdigit():
        return set()
    kinds: tuple[Literal[False], Literal[True]] = (False, True)
    return {shard_name(int(rank), attempt, encoded=encoded) for encoded in kinds}
