"""Smaller shards: what the last generation has is borrowed, the rest encoded where that pays.

Blocks are encoded side by side and laid back to back in order, in a fixed amount of memory. Knows
codecs, stores and the last snapshot. Knows nothing of votes or processes.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Literal

from torch_ckpt.codecs.names import codec_named
from torch_ckpt.errors import CkptError
from torch_ckpt.manifest.blocks import Extent, Placed, cut
from torch_ckpt.manifest.commit import read_manifest
from torch_ckpt.manifest.digest import sha256_hex, xxh3_hex
from torch_ckpt.manifest.layout import step_of_folder
from torch_ckpt.manifest.schema import Block
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.borrow import Base, Borrowing
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.lay import Laid
from torch_ckpt.writer.shard import Written, part_of, write_shard

logger = logging.getLogger(__name__)

_AHEAD = 8
"""Blocks encoded ahead of the one that is written."""
_PAYS = 1.05
"""How many times smaller a stream must be to be worth decoding."""
_DELTA_PAYS = 1.15
"""A delta costs its readers a base as well."""
_CORES = min(4, os.cpu_count() or 1)
_FULL_SHARE = 0.9
"""Of the time between two saves: what encoding may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How a writer makes shards smaller."""

    codec: Literal["raw", "zstd", "auto"] = "raw"
    incremental: bool = False
    full_every: int = 8
    """Generations that may build on one another before the next stands alone."""


@dataclass(frozen=True, slots=True)
class Coded:
    """One block on its way into a shard."""

    extent: Extent
    xxh3: str
    data: memoryview | bytes | None = None
    """None if the base's block is the same."""
    sha256: str = ""
    codec: str = "raw"
    seconds: float = 0.0
    """Of one core, in its codec."""


@dataclass
class _Speed:
    """What encoding has cost so far, to judge whether it pays."""

    stored: int = 0
    stored_s: float = 0.0
    coded: int = 0
    coded_s: float = 0.0
    """Of one core."""
    last_s: float = 0.0
    """Seconds that the last encoded shard took, and the time between its save and the next."""
    arrived: float | None = None
    interval_s: float = float("inf")

    def pays(self, ratio: float) -> bool:
        """Whether blocks that become `ratio` times smaller are durable sooner."""
        if ratio < _PAYS:
            return False
        if not (self.stored_s and self.coded_s):
            return True  # nothing is known yet
        storage, coding = self.stored / self.stored_s, _CORES * self.coded / self.coded_s
        return max(1 / coding, 1 / (ratio * storage)) < 1 / storage


@dataclass
class Encoder:
    """Serves one writer: remembers its last snapshot, which the next shard may build on."""

    encoding: Encoding
    _base: Base | None = None
    _speed: _Speed = field(default_factory=_Speed)

    def write(
        self,
        job: Job,
        placed: list[Placed],
        slab: memoryview,
        store: Store,
        pool: Executor,
        *,
        arrived: float,
    ) -> Written:
        """Make one rank's bytes durable, as `write_shard` does, in what is now less of them.

        `arrived` is when the trainer handed the snapshot over, by the monotonic clock.
        """
        speed, began = self._speed, time.monotonic()
        if speed.arrived is not None:
            speed.interval_s = arrived - speed.arrived
        speed.arrived = arrived
        late = speed.last_s > _FULL_SHARE * speed.interval_s
        if late:
            logger.warning(
                "step %d is stored without encoding: that took %.1f s, and saves come every %.1f s",
                job.step,
                speed.last_s,
                speed.interval_s,
            )
            speed.last_s = 0.0  # the next one is tried again
        base = None if late else self._base_of(job, placed, store)
        if base is None and (late or self.encoding.codec == "raw"):
            return write_shard(job, placed, slab, store, pool)
        if job.raw_bytes == 0:
            return Written()
        written = self._encoded(job, placed, slab, store, pool, base)
        speed.last_s = time.monotonic() - began
        return written

    def remember(
        self,
        job: Job,
        placed: list[Placed],
        slab: memoryview,
        written: Written,
        release: Callable[[], None],
    ) -> bool:
        """What `write` has written may be the next base; the one before is let go.

        Whether the slab stays here.

        `release` is called once the slab is not needed any more, at once if it never is.
        """
        before, self._base = self._base, None
        if before is not None:
            before.release()
        usable = step_of_folder(job.folder) is not None and job.same_as is None
        if not (self.encoding.incremental and usable):
            release()  # a folder of another name may be written again under its children
            return False
        depth = before.depth + 1 if before is not None and written.borrowed else 0
        part = part_of(job, placed, written)
        self._base = Base(
            job=job, placed=placed, slab=slab, part=part, depth=depth, release=release
        )
        return True

    def forget(self) -> None:
        """Let go of the last snapshot."""
        before, self._base = self._base, None
        if before is not None:
            before.release()

    def _base_of(self, job: Job, placed: list[Placed], store: Store) -> Base | None:
        base = self._base
        if base is None or base.depth >= self.encoding.full_every or base.job.step >= job.step:
            return None
        if base.placed != placed or base.job.run != job.run or base.job.root != job.root:
            return None
        try:
            committed = read_manifest(store, base.job.folder)
        except (CkptError, OSError):
            return None  # a rank failed, or it was removed: this one stands alone
        return base if committed.attempt == base.job.attempt else None

    def _encoded(
        self,
        job: Job,
        placed: list[Placed],
        slab: memoryview,
        store: Store,
        pool: Executor,
        base: Base | None,
    ) -> Written:
        laid = Laid(job, store)
        borrowing = Borrowing(base)
        blocks: list[Block] = []
        seen: dict[tuple[str, int], tuple[Extent, Block]] = {}
        try:
            for number, coded in enumerate(self._coded(placed, slab, pool, base)):
                if coded.seconds:
                    self._speed.coded += coded.extent.bytes
                    self._speed.coded_s += coded.seconds
                block = self._same(coded, slab, seen)
                if block is None and coded.data is None:
                    block = borrowing.same(number)
                elif block is None:
                    block = self._stored(coded, laid, borrowing.base_of(number, coded.codec))
                seen.setdefault((coded.xxh3, coded.extent.bytes), (coded.extent, block))
                blocks.append(block)
            files = laid.finish()
        except BaseException:
            laid.abandon()
            raise
        self._speed.stored += laid.bytes
        self._speed.stored_s += laid.seconds
        return borrowing.written(files, blocks)

    def _coded(
        self, placed: list[Placed], slab: memoryview, pool: Executor, base: Base | None
    ) -> Iterator[Coded]:
        """Every block in order, a few encoded ahead."""
        starts = {item.start: item.piece.dtype for item in placed if item.piece.bytes}
        dtype = ""
        ahead: deque[Future[Coded]] = deque()
        extents = iter(cut(placed))
        try:
            while True:
                while len(ahead) < _AHEAD and (extent := next(extents, None)) is not None:
                    dtype = starts.get(extent.start, dtype)  # a block has one, from its first byte
                    ahead.append(pool.submit(self._code, extent, dtype, slab, base))
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
            for future in ahead:
                if not future.cancelled():
                    future.exception()  # waits: the slab may be given back after this

    def _code(self, extent: Extent, dtype: str, slab: memoryview, base: Base | None) -> Coded:
        raw = slab[extent.start : extent.start + extent.bytes]
        xxh3 = xxh3_hex(raw)
        before = None
        if base is not None:
            before = base.slab[extent.start : extent.start + extent.bytes]
            if _equal(raw, before):
                return Coded(extent, xxh3)
        codec = self._choose(raw, dtype, before)
        if codec == "raw":
            return Coded(extent, xxh3, raw, sha256_hex(raw))
        began = time.thread_time()
        against = before if codec == "delta" else None
        stream = codec_named(codec).encode(raw, dtype=dtype, base=against)
        seconds = time.thread_time() - began
        if stream is None or len(stream) >= len(raw):
            return Coded(extent, xxh3, raw, sha256_hex(raw), seconds=seconds)
        return Coded(extent, xxh3, stream, sha256_hex(stream), codec, seconds)

    def _choose(self, raw: memoryview, dtype: str, before: memoryview | None) -> str:
        """The codec for a block, from a sample of it; raw where none pays."""
        ratios = {"raw": 1.0}
        if self.encoding.codec != "raw":
            ratios["zstd"] = codec_named("zstd").estimate(raw, dtype=dtype)
        if before is not None:
            ratio = codec_named("delta").estimate(raw, dtype=dtype, base=before)
            ratios["delta"] = ratio / _DELTA_PAYS
        name = max(ratios, key=lambda name: ratios[name])
        pays = self._speed.pays(ratios[name]) if self.encoding.codec == "auto" else True
        return name if pays else "raw"

    @staticmethod
    def _same(
        coded: Coded, slab: memoryview, seen: dict[tuple[str, int], tuple[Extent, Block]]
    ) -> Block | None:
        """The block of an earlier extent of this shard with the same bytes."""
        found = seen.get((coded.xxh3, coded.extent.bytes))
        if found is None:
            return None
        first, block = found
        here = slab[coded.extent.start : coded.extent.start + coded.extent.bytes]
        return block if _equal(here, slab[first.start : first.start + first.bytes]) else None

    @staticmethod
    def _stored(coded: Coded, laid: Laid, base: int | None) -> Block:
        data = memoryview(coded.data or b"")
        return Block(
            file=0,
            offset=laid.append(data),
            bytes=len(data),
            raw_bytes=coded.extent.bytes,
            sha256=coded.sha256,
            xxh3=coded.xxh3,
            codec=coded.codec,
            base=base,
        )


def _equal(one: memoryview, other: memoryview) -> bool:
    if len(one) != len(other):
        return False
    import numpy as np  # a writer of raw shards starts without it

    words = len(one) // 8 * 8
    return bool(
        np.array_equal(
            np.frombuffer(one[:words], np.uint64), np.frombuffer(other[:words], np.uint64)
        )
        and one[words:] == other[words:]
    )


class Share:
    """One job on its way through an encoder, or past it where there is none."""

    def __init__(self, encoder: Encoder | None, arrived: float) -> None:
        self.encoder, self._arrived = encoder, arrived
        self._job: tuple[Job, memoryview, Written] | None = None
        self.holds = False
        """Whether the slab stays with the encoder."""

    def write(
        self, job: Job, placed: list[Placed], slab: memoryview, store: Store, pool: Executor
    ) -> Written:
        """What `persist` is given to write with."""
        if self.encoder is None:
            return write_shard(job, placed, slab, store, pool)
        written = self.encoder.write(job, placed, slab, store, pool, arrived=self._arrived)
        self._job = job, slab, written
        return written

    def keep(self, placed: list[Placed], done: Callable[[], None]) -> None:
        """The shard is durable; `done` gives the slab back."""
        if self.encoder is None or self._job is None:
            done()  # a second name has no bytes of its own
            return
        job, slab, written = self._job
        self.holds = self.encoder.remember(job, placed, slab, written, done)

    def failed(self) -> None:
        """The save did not commit: nothing may build on it."""
        self.holds = False
        if self.encoder is not None:
            self.encoder.forget()
