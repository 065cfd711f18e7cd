"""A rank's share of the newest generation on its node's own disk, for a fast restart.

The shard is copied out of the slab while the save goes on; parts and manifest follow once the
generation is committed, so that a cache has no generation which the primary tier lacked. What the
cache lacks or refuses costs a slower restart and nothing else. Knows slabs as bytes and stores.
Knows nothing of processes or of the archive.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable

from torch_ckpt.errors import CkptError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.copy import complete_copy
from torch_ckpt.generations.litter import sweep
from torch_ckpt.manifest.blocks import Placed, safetensors_header
from torch_ckpt.manifest.layout import shard_name, step_of_folder
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.job import Job

logger = logging.getLogger(__name__)

_PIECE_BYTES = 8 << 20
_AT_ONCE = 2
"""As many as there are slabs."""


class Cache:
    """The cache of one run on this node, as the writer of one rank fills it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._copies: dict[str, threading.Thread] = {}
        self._failed: dict[str, str] = {}

    def keep(
        self, job: Job, placed: list[Placed], slab: memoryview, done: Callable[[], None]
    ) -> None:
        """Copy a shard out of its slab in the background; `done` is called once that is over."""

        def copy() -> None:
            try:
                self._copy(job, placed, slab)
            except (CkptError, OSError) as error:
                self._failed[job.attempt] = str(error)
                logger.warning("step %d is not cached: %s", job.step, error)
            finally:
                done()

        self._copies = dict([*self._copies.items()][1 - _AT_ONCE :])
        thread = threading.Thread(target=copy, name="ckpt-cache", daemon=True)
        self._copies[job.attempt] = thread
        thread.start()

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
        copying = self._copies.pop(attempt, None)
        if copying is None:
            return
        copying.join()
        if self._failed.pop(attempt, None) is not None:
            return
        try:
            complete_copy(primary, self._store, generation)
            self._drop_older(generation)
        except (CkptError, OSError) as error:
            logger.warning("step %d is not cached: %s", generation.step, error)

    def _drop_older(self, newest: Generation) -> None:
        """Free the room of what came before; peers on this node may be a save ahead of us."""
        catalog = Catalog(self._store)
        for one in catalog.committed():
            if one.step < newest.step or one.manifest.run != newest.manifest.run:
                catalog.delete(one)
        for folder in self._store.folders():
            step = step_of_folder(folder)
            if step is not None and step < newest.step:
                sweep(self._store, folder, spare_attempts=())

    def close(self) -> None:
        """Wait for copies that still run."""
        for thread in self._copies.values():
            thread.join()
