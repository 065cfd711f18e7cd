"""One rank's bytes, from a slab into a shard, and the part that describes them.

Raw bytes here; `encode` makes smaller shards. Knows stores and layouts. Knows nothing of votes,
processes or tensors.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

from torch_ckpt.errors import SaveFailed
from torch_ckpt.manifest.blocks import PAGE_BYTES, Extent, Placed, cut, safetensors_header
from torch_ckpt.manifest.commit import read_manifest, read_part
from torch_ckpt.manifest.digest import sha256_hex, xxh3_hex
from torch_ckpt.manifest.entries import Block, Chunk, TensorEntry
from torch_ckpt.manifest.layout import part_name, shard_name
from torch_ckpt.manifest.schema import Borrowed, Part, StoredFile
from torch_ckpt.storage.store import Sink, Store
from torch_ckpt.writer.ahead import in_order
from torch_ckpt.writer.job import Job

_AHEAD = 8
"""Blocks hashed ahead of a store that takes them only in order."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a part says of the bytes of one rank."""

    files: tuple[StoredFile, ...] = ()
    blocks: Sequence[Block] = ()
    borrowed: tuple[Borrowed, ...] = ()
    bases: Sequence[Block] = ()
    lossy: tuple[str, ...] = ()
    """The rules by which something is lost, for people."""

    @property
    def bytes(self) -> int:
        """Stored bytes of its own shards."""
        return sum(file.bytes for file in self.files)


def write_shard(
    job: Job,
    placed: list[Placed],
    slab: memoryview,
    store: Store,
    pool: Executor,
    extents: list[Extent] | None = None,
) -> Written:
    """Make one rank's bytes durable as they are, in a file that any tool reads.

    `extents` are its blocks where they are not as `cut` makes them by itself.
    """
    if job.raw_bytes == 0:
        return Written()
    if job.quantised:  # codes are nobody's bytes
        raise SaveFailed(step=job.step, reason="it was copied as codes and would be stored as such")
    shard = shard_name(job.rank, job.attempt)
    header = safetensors_header(placed)
    size = len(header) + job.raw_bytes
    extents = cut(placed) if extents is None else extents
    sink = store.create(f"{job.folder}/{shard}", size)
    try:
        write = _write_anywhere if store.capabilities.random_access else _write_in_order
        blocks = write(sink, header, slab, extents, pool)
        sink.finish()
    except BaseException:
        sink.abandon()
        raise
    return Written(files=(StoredFile(name=shard, bytes=size),), blocks=tuple(blocks))


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
    hashing = (functools.partial(_block, len(header), slab, extent) for extent in extents)
    blocks: list[Block] = []
    for extent, block in zip(extents, in_order(pool, hashing, _AHEAD), strict=True):
        sink.write_at(len(header) + extent.start, slab[extent.start : extent.start + extent.bytes])
        blocks.append(block)
    return blocks


def second_name(job: Job, store: Store) -> Written:
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
    files = []
    for file in part.files:
        encoded = not file.name.endswith(".safetensors")
        files.append(replace(file, name=shard_name(job.rank, job.attempt, encoded=encoded)))
        store.link(f"{source}/{file.name}", f"{job.folder}/{files[-1].name}")
    return Written(
        files=tuple(files),
        blocks=part.blocks,
        borrowed=part.borrowed,
        bases=part.bases,
        lossy=part.lossy,
    )


def part_of(job: Job, placed: list[Placed], written: Written) -> Part:
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
        files=written.files,
        blocks=written.blocks,
        borrowed=written.borrowed,
        bases=written.bases,
        lossy=written.lossy,
        tensors=tensors,
        aliases=job.aliases,
        tree=job.tree,
        per_rank=job.per_rank,
    )
