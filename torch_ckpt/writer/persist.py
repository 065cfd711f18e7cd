"""From a slab to a committed generation: blocks, shard, part, votes, manifest.

The order of the steps is the safety: what a document names is durable before the document is.
Knows stores and documents. Knows nothing of processes, sockets or tensors.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from torch_ckpt.errors import CkptError, SaveFailed
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.prune import prune
from torch_ckpt.generations.retention import Retention, from_json
from torch_ckpt.manifest.blocks import PAGE_BYTES, Extent, Placed, cut, safetensors_header
from torch_ckpt.manifest.commit import (
    publish_manifest,
    publish_part,
    read_manifest,
    read_part,
    write_latest,
)
from torch_ckpt.manifest.digest import sha256_hex, xxh3_hex
from torch_ckpt.manifest.layout import part_name, shard_name
from torch_ckpt.manifest.schema import Block, Chunk, Manifest, Part, StoredFile, TensorEntry
from torch_ckpt.storage.store import Sink, Store
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.leftovers import refuse, sweep_own, withdraw, withdraw_all
from torch_ckpt.writer.votes import Outside, await_votes

logger = logging.getLogger(__name__)

_AHEAD = 8
"""Blocks hashed ahead of a store that takes them only in order."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What the outside may say while a job runs."""

    released: Callable[[], None]
    """Called once the slab is not needed any more."""
    confirmed: Callable[[], str | None]
    """Waits until the trainer vouches for the snapshot; a reason means: discard it."""
    abandoned: Callable[[], str | None]
    """A reason if this save will never be complete."""
    alone: Callable[[], bool] = lambda: False
    """Whether the trainer is gone."""
    gone: Callable[[Iterable[int]], frozenset[int]] = lambda ranks: frozenset()
    """Those of some ranks whose writers were on this node and have ended."""
    keep: Callable[[list[Placed], Callable[[], None]], None] | None = None
    """Copies the slab elsewhere and then calls what it is given; None where nobody wants it."""
    prune: Callable[[Store, Retention], None] | None = None
    """Prunes in place of the rule alone: another tier has a say."""


def persist(job: Job, slab: memoryview, store: Store, pool: Executor, watch: Watch) -> Manifest:
    """Make one rank's share durable; on rank 0, commit the generation and prune.

    Ranks other than 0 return the manifest that rank 0 will publish, without its parts.

    Raises:
        SaveFailed: a rank did not vote, or the save was discarded.
        StorageError: storage refused; what this attempt wrote is removed as far as possible.
    """
    shard = shard_name(job.rank, job.attempt)
    began = time.monotonic()
    voting = False
    try:
        store.make_folder(job.folder)
        placed = job.placed()
        if job.same_as is not None:
            files, blocks = _second_name(job, store, shard)
        else:
            files, blocks = write_shard(job, placed, slab, store, pool, shard)
        own_s = time.monotonic() - began
        if watch.keep is None:
            watch.released()
        else:
            watch.keep(placed, watch.released)
        reason = watch.confirmed() or watch.abandoned()
        if reason is not None:
            raise SaveFailed(step=job.step, reason=reason)
        voting = True
        own = publish_part(store, job.folder, part_of(job, placed, files, blocks))
        own_bytes = sum(file.bytes for file in files)
        if job.rank != 0:
            return manifest_of(job, (own,), own_bytes)
        outside = Outside(
            abandoned=watch.abandoned, alone=watch.alone, own_s=own_s, gone=watch.gone
        )
        votes = await_votes(store, job, own, own_bytes, pool, outside)
        manifest = manifest_of(job, votes.parts, votes.shard_bytes)
    except (CkptError, OSError) as error:
        watch.released()
        _give_up(job, store, error, voting=voting)
        raise
    try:
        publish_manifest(store, job.folder, manifest)
    except (CkptError, OSError):
        # Even now the manifest may be there, and then it must find everything that it names.
        if store.capabilities.files and not _published(job, store):
            withdraw_all(store, job.folder, job.attempt)
        raise
    tidy(job, store, watch.prune)
    return manifest


def _give_up(job: Job, store: Store, error: Exception, *, voting: bool) -> None:
    """Free what is ours to free, and tell who would wait."""
    if job.rank == 0:
        withdraw_all(store, job.folder, job.attempt)
        return
    if not voting:  # a vote that the coordinator may have counted cannot be taken back
        withdraw(store, job.folder, job.rank, job.attempt)
    reason = error.reason if isinstance(error, SaveFailed) else str(error)
    refuse(store, job.folder, job.rank, job.attempt, reason)


def write_shard(
    job: Job, placed: list[Placed], slab: memoryview, store: Store, pool: Executor, shard: str
) -> tuple[tuple[StoredFile, ...], tuple[Block, ...]]:
    """Make one rank's bytes durable; what its part says of them."""
    if job.raw_bytes == 0:
        return (), ()
    header = safetensors_header(placed)
    size = len(header) + job.raw_bytes
    extents = cut(placed)
    sink = store.create(f"{job.folder}/{shard}", size)
    try:
        write = _write_anywhere if store.capabilities.random_access else _write_in_order
        blocks = write(sink, header, slab, extents, pool)
        sink.finish()
    except BaseException:
        sink.abandon()
        raise
    return (StoredFile(name=shard, bytes=size),), tuple(blocks)


def _write_anywhere(
    sink: Sink, header: bytes, slab: memoryview, extents: list[Extent], pool: Executor
) -> list[Block]:
    page_aligned = mmap.mmap(-1, len(header))
    page_aligned[:] = header
    sink.write_at(0, memoryview(page_aligned))
    return _results(
        pool.submit(_hash_and_write, sink, len(header), slab, extent, last=extent is extents[-1])
        for extent in extents
    )


def _hash_and_write(
    sink: Sink, data_start: int, slab: memoryview, extent: Extent, *, last: bool
) -> Block:
    """Hash a block, then write the pages that begin in it.

    The slab is an image of the file's data, so the page that two blocks share is written once,
    by the block in which it ends, and every write is aligned.
    """
    end = extent.start + extent.bytes
    block = _block(data_start, slab, extent)
    first = extent.start - extent.start % PAGE_BYTES
    stop = end if last else end - end % PAGE_BYTES
    if stop > first:
        sink.write_at(data_start + first, slab[first:stop])
    return block


def _block(data_start: int, slab: memoryview, extent: Extent) -> Block:
    data = slab[extent.start : extent.start + extent.bytes]
    return Block(
        file=0,
        offset=data_start + extent.start,
        bytes=extent.bytes,
        raw_bytes=extent.bytes,
        sha256=sha256_hex(data),
        xxh3=xxh3_hex(data),
    )


def _results(submitted: Iterable[Future[Block]]) -> list[Block]:
    """All results in order; if one fails, the others are stopped before its error is raised."""
    futures: list[Future[Block]] = []
    try:
        futures.extend(submitted)
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.exception()  # waits: nobody may write once the sink is abandoned
        raise


def _write_in_order(
    sink: Sink, header: bytes, slab: memoryview, extents: list[Extent], pool: Executor
) -> list[Block]:
    sink.write_at(0, memoryview(header))
    blocks: list[Block] = []
    ahead: deque[Future[Block]] = deque()
    upcoming: Iterator[Extent] = iter(extents)
    for extent in extents:
        while len(ahead) < _AHEAD and (following := next(upcoming, None)) is not None:
            ahead.append(pool.submit(_block, len(header), slab, following))
        sink.write_at(len(header) + extent.start, slab[extent.start : extent.start + extent.bytes])
        blocks.append(ahead.popleft().result())
    return blocks


def _second_name(
    job: Job, store: Store, shard: str
) -> tuple[tuple[StoredFile, ...], tuple[Block, ...]]:
    """Give the shard of another generation of this step a second name."""
    source = str(job.same_as)
    try:
        manifest = read_manifest(store, source)
        stored = next(p for p in manifest.parts if p.name == part_name(job.rank, manifest.attempt))
        part = read_part(store, source, stored)
    except (FileNotFoundError, StopIteration) as error:
        raise SaveFailed(
            step=job.step, reason=f"{source}, whose bytes it shares, did not commit"
        ) from error
    for file in part.files:
        store.link(f"{source}/{file.name}", f"{job.folder}/{shard}")
    return tuple(StoredFile(name=shard, bytes=file.bytes) for file in part.files), part.blocks


def part_of(
    job: Job, placed: list[Placed], files: tuple[StoredFile, ...], blocks: tuple[Block, ...]
) -> Part:
    """The part that describes a shard; pieces of one tensor are chunks of one entry."""
    chunks: dict[str, list[Chunk]] = {}
    for item in placed:
        chunk = Chunk(offsets=item.piece.offsets, shape=item.piece.shape, start=item.start)
        chunks.setdefault(item.piece.name, []).append(chunk)
    kinds = {item.piece.name: item.piece for item in placed}
    tensors = tuple(
        TensorEntry(name=name, dtype=piece.dtype, shape=piece.whole, chunks=tuple(chunks[name]))
        for name, piece in kinds.items()
    )
    return Part(
        step=job.step,
        attempt=job.attempt,
        run=job.run,
        rank=job.rank,
        world_size=job.world_size,
        files=files,
        blocks=blocks,
        tensors=tensors,
        aliases=job.aliases,
        tree=job.tree,
        per_rank=job.per_rank,
    )


def manifest_of(job: Job, parts: tuple[StoredFile, ...], stored_bytes: int) -> Manifest:
    """The manifest that names these parts."""
    return Manifest(
        step=job.step,
        attempt=job.attempt,
        run=job.run,
        created=job.created,
        world_size=job.world_size,
        parts=parts,
        bytes=stored_bytes,
        parent=job.parent,
        mesh=job.mesh,
        tags=job.tags,
        metrics=job.metrics,
        framework=job.framework,
    )


def tidy(
    job: Job, store: Store, prune_with: Callable[[Store, Retention], None] | None = None
) -> None:
    """Tidy up; the generation is committed, so a failure here is a warning."""
    # Each on its own: a full disk refuses the first and is freed by the others.
    duties: list[Callable[[], None]] = [
        lambda: write_latest(store, job.folder),
        lambda: sweep_own(store, job.folder, job.attempt),
        lambda: _prune(job, store, prune_with),
    ]
    for duty in duties:
        try:
            duty()
        except (CkptError, OSError) as error:
            logger.warning(
                "step %d is committed, but tidying up after it failed: %s", job.step, error
            )


def _prune(job: Job, store: Store, prune_with: Callable[[Store, Retention], None] | None) -> None:
    if job.keep is None:
        return
    rule = from_json(job.keep)
    if prune_with is not None:
        prune_with(store, rule)
    else:
        prune(Catalog(store), rule, run=job.run)


def _published(job: Job, store: Store) -> bool:
    """Whether a manifest may be there; one of another attempt counts too."""
    try:
        read_manifest(store, job.folder)
    except FileNotFoundError:
        return False
    except (CkptError, OSError):
        return True
    return True
