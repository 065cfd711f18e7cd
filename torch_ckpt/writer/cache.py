"""A rank's share of the newest generation on its node's own disk, for a fast restart.

A raw shard is copied out of the slab while the save goes on, an encoded one out of the primary tier
once the generation is committed, with what it builds on. Parts and manifest follow the commit, so
that a cache has no generation which the primary tier lacked. What the cache lacks or refuses costs
a slower restart and nothing else. Knows slabs as bytes and stores. Knows nothing of processes or of
the archive.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from torch_ckpt.errors import CkptError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.copy import complete_copy, copy_part
from torch_ckpt.generations.litter import sweep
from torch_ckpt.generations.shards import Shards
from torch_ckpt.manifest.attempts import is_stale
from torch_ckpt.manifest.blocks import Placed, safetensors_header
from torch_ckpt.manifest.commit import read_part
from torch_ckpt.manifest.layout import part_name, shard_name, step_of_folder
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.job import Job

logger = logging.getLogger(__name__)

_PIECE_BYTES = 8 << 20
_AT_ONCE = 2
"""As many as there are slabs."""
_CLOSE_S = 30.0
_UNCOMMITTED = 16
"""Saves that are remembered until they are committed; few of them never are."""

_Noted = TypeVar("_Noted")


class Cache:
    """The cache of one run on this node, as the writer of one rank fills it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._copies: dict[str, threading.Thread] = {}
        self._encoded: dict[str, int] = {}
        """Ranks by the attempts whose shards are encoded."""
        self._failed: dict[str, str] = {}

    def keep(
        self, job: Job, placed: list[Placed], slab: memoryview, done: Callable[[], None]
    ) -> None:
        """Copy a shard out of its slab in the background; `done` is called once that is over."""

        def copy() -> None:
            try:
                self._copy(job, placed, slab)
            except (CkptError, OSError) as error:
                self._failed = _with(self._failed, job, str(error), most=_UNCOMMITTED)
                logger.warning("step %d is not cached: %s", job.step, error)
            finally:
                done()

        thread = threading.Thread(target=copy, name="ckpt-cache", daemon=True)
        self._copies = _with(self._copies, job, thread, most=_AT_ONCE)
        thread.start()

    def keep_encoded(self, job: Job) -> None:
        """A shard that no slab holds as it is stored: it is read back once it is committed."""
        self._encoded = _with(self._encoded, job, job.rank, most=_UNCOMMITTED)

    def _copy(self, job: Job, placed: list[Placed], slab: memoryview) -> None:
        store, name = self._store, f"{job.folder}/{shard_name(job.rank, job.attempt)}"
        store.make_folder(job.folder)
        if job.same_as is not None:
            manifest = Catalog(store).find(folder=job.same_as).manifest
            store.link(f"{job.same_as}/{shard_name(job.rank, manifest.attempt)}", name)
            return
        if job.raw_bytes == 0:
            return
        header = safetensors_header(placed)
        sink = store.create(name, len(header) + job.raw_bytes)
        try:
            page_aligned = mmap.mmap(-1, len(header))
            page_aligned[:] = header
            sink.write_at(0, memoryview(page_aligned))
            for start in range(0, job.raw_bytes, _PIECE_BYTES):
                piece = slab[start : min(start + _PIECE_BYTES, job.raw_bytes)]
                sink.write_at(len(header) + start, piece)
            sink.finish()
        except BaseException:
            sink.abandon()
            raise

    def seal(self, primary: Store, generation: Generation) -> None:
        """The generation is committed: complete this node's copy of it, drop older ones.

        Every rank of a node does this, with the same documents. Failures are logged.
        """
        attempt = generation.manifest.attempt
        rank = self._encoded.pop(attempt, None)
        copying = self._copies.pop(attempt, None)
        if copying is not None:
            copying.join()
        elif rank is None:
            return
        if self._failed.pop(attempt, None) is not None:
            return
        try:
            if rank is not None:
                self._bring(primary, generation, part_name(rank, attempt))
            complete_copy(primary, self._store, generation)
            self._drop_older(generation)
        except (CkptError, OSError) as error:
            logger.warning("step %d is not cached: %s", generation.step, error)

    def _bring(self, primary: Store, generation: Generation, name: str) -> None:
        """Copy the shards that a part needs and the cache lacks, out of the primary tier."""
        stored = next(one for one in generation.manifest.parts if one.name == name)
        part, here = read_part(primary, generation.folder, stored), Shards(self._store)
        lent: dict[str, set[str]] = {}
        for one in part.borrowed:
            lent.setdefault(one.folder, set()).add(one.name)
        for folder, names in lent.items():
            if here.lacking(generation.folder, part, only=names) is None:
                continue  # of an earlier save
            base = Catalog(primary).find(folder=folder)
            stems = {shard.rpartition(".")[0] for shard in names}
            for lender in base.manifest.parts:
                if lender.name.rpartition(".")[0] in stems:
                    copy_part(primary, self._store, folder, lender, files=names)
            complete_copy(primary, self._store, base)
        copy_part(primary, self._store, generation.folder, stored)

    def _drop_older(self, newest: Generation) -> None:
        """Free the room of what came before; peers on this node may be a save ahead of us.

        What the newest builds on stays.
        """
        catalog, run, bases = Catalog(self._store), newest.manifest.run, newest.manifest.bases
        attempt = newest.manifest.attempt
        for one in catalog.committed():
            builds = one.manifest.run == run and one.step in bases
            if one.manifest.run != run or (one.step < newest.step and not builds):
                catalog.delete(one)
        for folder in self._store.folders():
            step = step_of_folder(folder)
            if step in bases:
                continue
            if step is not None and step < newest.step:
                sweep(self._store, folder)
                continue
            # Folders of other names, and of steps from which the run went back: tries that are
            # over. What a peer is copying is newer, or of this save.
            if sweep(self._store, folder, spare=lambda one: not is_stale(one, attempt)):
                self._store.delete_folder(folder)

    def close(self) -> None:
        """Wait for copies that still run, though not for a disk that hangs."""
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._copies.values():
            thread.join(max(0.0, deadline - time.monotonic()))


def _with(noted: dict[str, _Noted], job: Job, value: _Noted, *, most: int) -> dict[str, _Noted]:
    """What is noted by attempts, and this one as well: the oldest ones go."""
    return {**dict([*noted.items()][1 - most :]), job.attempt: value}
