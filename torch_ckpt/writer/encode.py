"""Smaller shards: what the last generation has is borrowed, the rest encoded where that pays.

Blocks are encoded side by side and laid back to back in order, in a fixed amount of memory. Knows
stores, parts and the last snapshot. Knows nothing of votes or processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from torch_ckpt.errors import SaveFailed
from torch_ckpt.manifest.blocks import Extent, Placed, cut
from torch_ckpt.manifest.entries import Block
from torch_ckpt.manifest.layout import shard_name, step_of_folder
from torch_ckpt.manifest.schema import Borrowed, Manifest
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.ahead import in_order
from torch_ckpt.writer.borrow import Base, Borrowing, lenders
from torch_ckpt.writer.code import Coded, Coder, Lossless, Speed, equal
from torch_ckpt.writer.expand import expand
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.lay import Laid
from torch_ckpt.writer.line import Line, are_sound, follows, needed
from torch_ckpt.writer.rules import Rule, grouping
from torch_ckpt.writer.shard import Written, part_of, write_shard

logger = logging.getLogger(__name__)

_AHEAD = 8
"""Blocks encoded ahead of the one that is written."""
_NO_ANCHOR = (
    "its moments were copied as 8-bit codes, and this writer knows of no generation without loss "
    "any more that could stand beside them; the next save loses nothing"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How a writer makes shards smaller."""

    codec: str = "raw"
    """For tensors that no rule names: raw, zstd or auto."""
    rules: Sequence[Rule] = ()
    incremental: bool = False
    full_every: int = 8
    """Generations that may build on one another before the next stands alone."""
    permanent_every: Sequence[int] = ()
    """Steps that are multiples of one of these are kept for ever, as those tagged permanent are."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Encoding:
        """What a writer was told, as JSON."""
        rules = tuple(Rule(*rule) for rule in options["rules"])
        return cls(**{**options, "rules": rules})

    def alone(self, job: Job) -> bool:
        """Whether a generation builds on nothing: it is kept for ever, and its bases would be."""
        return "permanent" in job.tags or any(job.step % n == 0 for n in self.permanent_every)

    @property
    def lossy(self) -> bool:
        """Whether a rule loses anything."""
        return any(rule.lossy for rule in self.rules)

    @property
    def plain(self) -> bool:
        """Whether a generation that stands alone is stored as it is."""
        return self.codec == "raw" and all(rule.codec == "raw" or rule.lossy for rule in self.rules)


@dataclass
class Encoder:
    """Serves one writer: remembers its last snapshot, which the next shard may build on."""

    encoding: Encoding
    _base: Base | None = None
    _line: Line = field(default_factory=Line)
    _speed: Speed = field(default_factory=Speed)
    _encoded_last: bool = False

    def write(
        self,
        job: Job,
        placed: list[Placed],
        slab: memoryview,
        store: Store,
        pool: Executor,
        *,
        late: bool,
    ) -> Written:
        """Make one rank's bytes durable, as `write_shard` does, in what is now less of them.

        `late` says that training had to wait for storage.
        """
        plain = not job.quantised and self._goes_plain(job, late=late)
        base, anchors = self._builds_on(job, placed, store)
        if job.quantised:
            if not anchors:
                raise SaveFailed(step=job.step, reason=_NO_ANCHOR)
            expand(job, placed, slab, pool)
        # The same in every generation, since blocks of two are compared by their numbers.
        extents = cut(placed, group=grouping(self.encoding.rules))
        if base is None and (plain or (self.encoding.plain and not anchors)):
            self._encoded_last = False
            return write_shard(job, placed, slab, store, pool, extents)
        if job.raw_bytes == 0:
            return Written()
        rules = [
            rule for rule in self.encoding.rules if not (plain or (rule.lossy and not anchors))
        ]
        coder = Coder(
            slab=slab,
            base=None if base is None else base.slab,
            digests=[] if base is None else [block.xxh3 for block in base.part.blocks],
            default="raw" if plain else self.encoding.codec,
            rules=rules,
            lossless=Lossless(speed=self._speed, deltas=not plain),
            expanded=frozenset(start for start, _ in job.quantised),
        )
        work, borrowing = coder.work(placed, extents), Borrowing(base, anchors)
        written = self._encoded(job, coder, work, store, pool, borrowing)
        self._encoded_last = not plain  # after one that is not, the next is tried again
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

        A folder of another name than a step's may be written again under its children, so it is
        no base, and the one before stays. `release` is called once the slab is not needed any
        more. Returns whether that is later.
        """
        if step_of_folder(job.folder) is None:
            release()
            return False
        before, self._base = self._base, None
        if before is not None:
            before.release()
        part = part_of(job, placed, written)
        if self.encoding.incremental or self.encoding.lossy:
            self._line.add(job, lenders(part, job.folder))
        if not self.encoding.incremental:
            release()
            return False
        self._base = Base(job=job, placed=placed, slab=slab, part=part, release=release)
        return True

    def anchors_next(self, job: Job, manifest: Manifest | None) -> bool:
        """Whether the save after this one may lose something, as far as anybody can tell.

        `manifest` is what was committed; None on ranks that do not commit.
        """
        return self.encoding.lossy and self._line.will_go_on(
            job, manifest, self.encoding.full_every
        )

    def forget(self) -> None:
        """Let go of the last snapshot: the next generation stands alone."""
        before, self._base, self._line = self._base, None, Line()
        if before is not None:
            before.release()

    def _goes_plain(self, job: Job, *, late: bool) -> bool:
        """Whether encoding keeps training waiting, so that blocks are borrowed or left raw."""
        if not (late and self._encoded_last):
            return False
        logger.warning(
            "step %d is not encoded: that took longer than the time between two saves",
            job.step,
        )
        return True

    def _builds_on(
        self, job: Job, placed: list[Placed], store: Store
    ) -> tuple[Base | None, tuple[Borrowed, ...]]:
        """The base of a generation, and what it has to name if it loses anything."""
        if self.encoding.alone(job):
            return None, ()
        base, lossy = self._base, self.encoding.lossy
        if base is not None and (base.placed != placed or not follows(job, base.job)):
            base = None
        wanted = [] if base is None else needed(base.part.borrowed, base.job)
        there = self._line.look(job, store, wanted, lossy=lossy)
        if not self._line.goes_on(job, self.encoding.full_every):
            return None, ()
        anchors = self._line.anchors(job, there) if lossy else ()
        return base if are_sound(wanted, there) else None, anchors

    def _encoded(
        self,
        job: Job,
        coder: Coder,
        work: Iterator[Callable[[], Coded]],
        store: Store,
        pool: Executor,
        borrowing: Borrowing,
    ) -> Written:
        shard = shard_name(job.rank, job.attempt, encoded=True)
        laid = Laid(store, f"{job.folder}/{shard}", job.raw_bytes)
        blocks: list[Block] = []
        lossy: set[str] = set()
        seen: dict[tuple[str, int], tuple[Extent, Block]] = {}
        try:
            for number, coded in enumerate(in_order(pool, work, _AHEAD)):
                self._speed.note_coded(coded)
                block = None if coded.lost_by else _twin(coded, coder.slab, seen)
                if block is None and coded.data is None:
                    block = borrowing.same(number)
                elif block is None:
                    block = laid.add(coded, borrowing.base_of(number, coded.codec))
                if coded.lost_by:
                    lossy.add(coded.lost_by)
                else:
                    seen.setdefault((coded.xxh3, coded.extent.bytes), (coded.extent, block))
                blocks.append(block)
            files = laid.finish()
        except BaseException:
            laid.abandon()
            raise
        self._speed.note_stored(laid.bytes, laid.seconds)
        return borrowing.written(files, blocks, lossy)


def _twin(
    coded: Coded, slab: memoryview, seen: dict[tuple[str, int], tuple[Extent, Block]]
) -> Block | None:
    """The block of an earlier extent of this shard with the same bytes."""
    found = seen.get((coded.xxh3, coded.extent.bytes))
    if found is None:
        return None
    first, block = found
    here = slab[coded.extent.start : coded.extent.start + coded.extent.bytes]
    return block if equal(here, slab[first.start : first.start + first.bytes]) else None
