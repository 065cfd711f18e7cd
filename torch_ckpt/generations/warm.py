"""Fill a cache with a rank's share while it is read from farther away, without a second pass.

Blocks come by as they are stored, once they are verified, in any order and from any thread. A share
of which all came by is kept; anything else, and any failure, costs a slower restart and nothing
else. Knows stores and parts. Knows nothing of tensors or ranks.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from torch_ckpt.errors import CkptError
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.copy import complete_copy
from torch_ckpt.generations.header import is_raw, read_header
from torch_ckpt.generations.read import BlockReader
from torch_ckpt.generations.shards import manifest_in, sizes_in
from torch_ckpt.manifest.schema import Part
from torch_ckpt.storage.store import Sink, Store

logger = logging.getLogger(__name__)


@dataclass
class _Copy:
    """A shard on its way into the cache."""

    sink: Sink
    missing: set[int] = field(default_factory=set)
    """Offsets of the blocks that did not come by yet; several blocks may be the same bytes."""


class Warming:
    """One generation on its way into one cache; does nothing where there is no cache or share."""

    def __init__(
        self, source: Store, cache: Store | None, generation: Generation, part: Part | None
    ) -> None:
        self._source, self._generation, self._part = source, generation, part
        self._cache: Store | None = None
        self._copies: dict[int, _Copy] = {}
        self._lock = threading.Lock()
        self._failed = False
        if cache is None or part is None or part.borrowed or part.bases:
            return  # the next save brings what a share builds on into the cache as well
        try:
            self._begin(cache, part)
        except (CkptError, OSError) as error:
            self._give_up(error)

    def _begin(self, cache: Store, part: Part) -> None:
        folder = self._generation.folder
        there, known = sizes_in(cache, folder), manifest_in(cache, folder)
        # Without a manifest nobody may use it, and this load has the bytes at hand.
        is_kept = known is not None and known.attempt == self._generation.manifest.attempt
        if is_kept and all(there.get(file.name) == file.bytes for file in part.files):
            return  # it has this share, and others lack theirs
        cache.make_folder(folder)
        for number, file in enumerate(part.files):
            cache.delete(f"{folder}/{file.name}")
            self._copies[number] = _Copy(cache.create(f"{folder}/{file.name}", file.bytes))
            self._head(part, number)
        for block in part.blocks:
            self._copies[block.file].missing.add(block.offset)
        self._cache = cache

    def _head(self, part: Part, number: int) -> None:
        """What no block covers: the header of a shard, of which only the part tells what it is."""
        folder = self._generation.folder
        reader = BlockReader(self._source, folder, part)
        if not is_raw(reader, number):
            return
        head = read_header(self._source, folder, reader, number)
        self._copies[number].sink.write_at(0, memoryview(bytearray(head)))

    def take(self, part: Part, index: int, stored: memoryview) -> None:
        """A verified block came by, as it is stored."""
        if part is not self._part or self._cache is None or self._failed:
            return
        block = part.blocks[index]
        copy = self._copies[block.file]
        with self._lock:
            if block.offset not in copy.missing:
                return
            copy.missing.discard(block.offset)
        try:
            copy.sink.write_at(block.offset, stored)
        except (CkptError, OSError) as error:
            self._give_up(error)

    def finish(self) -> None:
        """The generation was loaded: keep the share if it is complete."""
        cache, folder = self._cache, self._generation.folder
        if cache is None or self._failed:
            return
        if any(copy.missing for copy in self._copies.values()):
            logger.info("%s was not read whole, so it is not cached", folder)
            return
        try:
            while self._copies:
                number = next(iter(self._copies))
                self._copies[number].sink.finish()
                del self._copies[number]
            complete_copy(self._source, cache, self._generation)
        except (CkptError, OSError) as error:
            self._give_up(error)

    def close(self) -> None:
        """Drop what was not finished."""
        while self._copies:
            self._copies.popitem()[1].sink.abandon()

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        logger.warning("%s is not cached: %s", self._generation.folder, error)
