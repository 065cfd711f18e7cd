"""One block from a slab to what is stored of it: nothing, a stream of some codec, or itself.

Any thread may do it. Knows codecs, rules and two slabs. Knows nothing of files or parts.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch_ckpt.codecs.names import codec_named
from torch_ckpt.manifest.blocks import Extent, Placed
from torch_ckpt.manifest.digest import sha256_hex, xxh3_hex
from torch_ckpt.writer.rules import Rule, rule_for

_PAYS = 1.05
"""How many times smaller a stream must be to be worth decoding."""
_DELTA_PAYS = 1.15
"""A delta costs its readers a base as well."""
_CORES = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Coded:
    """One block on its way into a shard."""

    extent: Extent
    xxh3: str
    """Of what a reader will get."""
    data: memoryview | bytes | None = None
    """None if the base's block is the same."""
    sha256: str = ""
    codec: str = "raw"
    lost_by: str = ""
    """The rule by which a reader gets other values; empty if it gets the same."""
    seconds: float = 0.0
    """Of one core, in its codec."""


@dataclass
class Speed:
    """What storing and encoding have cost so far, to judge whether a codec pays."""

    stored: int = 0
    stored_s: float = 0.0
    coded: int = 0
    coded_s: float = 0.0
    """Of one core."""

    def note_coded(self, coded: Coded) -> None:
        """A block has been through a codec, or past all of them."""
        if coded.seconds:
            self.coded += coded.extent.bytes
            self.coded_s += coded.seconds

    def note_stored(self, size: int, seconds: float) -> None:
        """So many bytes have been written."""
        self.stored += size
        self.stored_s += seconds

    def pays(self, ratio: float) -> bool:
        """Whether blocks that become `ratio` times smaller are durable sooner."""
        if ratio < _PAYS:
            return False
        if not (self.stored_s and self.coded_s):
            return True  # nothing is known yet
        storage, coding = self.stored / self.stored_s, _CORES * self.coded / self.coded_s
        return max(1 / coding, 1 / (ratio * storage)) < 1 / storage


@dataclass(frozen=True, kw_only=True, slots=True)
class Lossless:
    """Codes blocks so that they come back bit for bit, where that pays."""

    speed: Speed
    deltas: bool = True
    """Whether blocks may be stored as what differs from a base's."""

    def encode(
        self,
        extent: Extent,
        raw: memoryview,
        dtype: str,
        wanted: str,
        before: memoryview | None = None,
    ) -> Coded:
        """What is stored of a block: raw, zstd or auto is `wanted`, `before` a base to build on."""
        codec, began = self._choose(raw, dtype, wanted, before), time.thread_time()
        stream, seconds = None, 0.0
        if codec != "raw":
            against = before if codec == "delta" else None
            stream = codec_named(codec).encode(raw, dtype=dtype, base=against)
            seconds = time.thread_time() - began
        if stream is None or len(stream) >= len(raw):
            return Coded(extent, xxh3_hex(raw), raw, sha256_hex(raw), seconds=seconds)
        digest = sha256_hex(stream)
        return Coded(extent, xxh3_hex(raw), stream, digest, codec, seconds=seconds)

    def _choose(self, raw: memoryview, dtype: str, wanted: str, before: memoryview | None) -> str:
        """The codec for a block, from a sample of it; raw where none pays."""
        ratios = {"raw": 1.0}
        if wanted != "raw":
            ratios["zstd"] = codec_named("zstd").estimate(raw, dtype=dtype)
        if before is not None and self.deltas:
            ratio = codec_named("delta").estimate(raw, dtype=dtype, base=before)
            ratios["delta"] = ratio / _DELTA_PAYS
        name = max(ratios, key=lambda name: ratios[name])
        pays = self.speed.pays(ratios[name]) if wanted == "auto" else True
        return name if pays else "raw"


@dataclass(frozen=True, kw_only=True, slots=True)
class Coder:
    """Codes the blocks of one shard."""

    slab: memoryview
    """Writable where a rule loses anything: what a reader gets is put back into it."""
    base: memoryview | None
    """The snapshot before, of the same layout."""
    digests: Sequence[str]
    """XXH3 of its blocks, as they are stored."""
    default: str
    rules: Sequence[Rule]
    lossless: Lossless
    expanded: frozenset[int] = frozenset()
    """Where pieces lie whose values are those that codes stand for."""

    def work(
        self, placed: Sequence[Placed], extents: Sequence[Extent]
    ) -> Iterator[Callable[[], Coded]]:
        """The coding of every block, in order."""
        return (functools.partial(self.code, *planned) for planned in self.plan(placed, extents))

    def plan(
        self, placed: Sequence[Placed], extents: Sequence[Extent]
    ) -> Iterator[tuple[int, Extent, str, Rule, bool]]:
        """Every block in order with its number, its dtype, its rule and whether that has lost
        something of it already."""
        items = [item for item in placed if item.piece.bytes]
        first = 0
        for number, extent in enumerate(extents):
            end = extent.start + extent.bytes
            while items[first].start + items[first].piece.bytes <= extent.start:
                first += 1
            last = first
            while last < len(items) and items[last].start < end:
                last += 1
            names = {item.piece.name for item in items[first:last]}
            rule = rule_for(self.rules, names, self.default)
            lost = items[first].start in self.expanded
            yield number, extent, items[first].piece.dtype, rule, lost

    def code(self, number: int, extent: Extent, dtype: str, rule: Rule, lost: bool) -> Coded:
        """What is stored of a block; `lost` says that it has lost something by its rule already."""
        lost_by = str(rule) if lost else ""
        raw = self.slab[extent.start : extent.start + extent.bytes]
        before = None
        if self.base is not None:
            before = self.base[extent.start : extent.start + extent.bytes]
            if xxh3_hex(before) != self.digests[number]:
                before = None  # not what a reader gets: nothing could be decoded against it
            elif equal(raw, before):
                return Coded(extent, self.digests[number], lost_by=lost_by)
        if rule.lossy and (coded := self._lossy(extent, raw, dtype, rule, before)) is not None:
            return coded
        wanted = self.default if rule.lossy else rule.codec
        coded = self.lossless.encode(extent, raw, dtype, wanted, before)
        return replace(coded, lost_by=lost_by) if lost else coded

    def _lossy(
        self, extent: Extent, raw: memoryview, dtype: str, rule: Rule, before: memoryview | None
    ) -> Coded | None:
        """A block that comes back as other values, which the slab has from now on as well."""
        codec = rule.made()
        if codec.needs_base and before is None:
            return None
        against = before if codec.needs_base else None
        began = time.thread_time()
        stream = codec.encode(raw, dtype=dtype, base=against)
        if stream is None or len(stream) >= len(raw):
            return None
        # The next generation compares with this: what is lost once is never lost again.
        raw[:] = codec.decode(memoryview(stream), raw_bytes=len(raw), base=against)
        return Coded(
            extent,
            xxh3_hex(raw),
            stream,
            sha256_hex(stream),
            codec.name,
            lost_by=str(rule),
            seconds=time.thread_time() - began,
        )


def equal(one: memoryview, other: memoryview) -> bool:
    """Whether two runs of bytes are the same."""
    import numpy as np  # a writer of raw shards starts without it

    if len(one) != len(other):
        return False
    words = len(one) // 8 * 8
    here, there = (np.frombuffer(run[:words], np.uint64) for run in (one, other))
    return bool(np.array_equal(here, there) and one[words:] == other[words:])
