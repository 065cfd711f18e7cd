"""A generation from one store to another: only what lacks travels, every block is checked.

The order is that of a commit: shards, then parts, then the manifest. So a copy that was cut
anywhere leaves no generation, and the next try sends no finished file again. Knows stores and
documents. Knows nothing of which generations are worth copying, or of who else copies.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch_ckpt.errors import FormatError, IntegrityError, StorageError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.index import forget
from torch_ckpt.generations.litter import sweep
from torch_ckpt.generations.passage import Passage
from torch_ckpt.generations.read import BlockReader
from torch_ckpt.generations.shards import Shards, manifest_in, missing_document, sizes_in
from torch_ckpt.manifest.commit import (
    publish_manifest,
    put_document,
    read_manifest,
    read_part,
    read_part_bytes,
)
from torch_ckpt.manifest.parse import parse_part
from torch_ckpt.manifest.schema import Manifest, Part, StoredFile
from torch_ckpt.storage.store import Read, Store

logger = logging.getLogger(__name__)

Pace = Callable[[int], None]
"""Told of bytes before they are sent; from any thread. May wait, or raise to end the copy."""

Progress = Callable[[int], None]
"""Called with the bytes of each file that is there; from any thread."""

_TRIES = 2
"""A flipped bit may be of the way and not of the disk: what is read again tells which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """What a copy has sent; the rest was there."""

    files: int = 0
    bytes: int = 0

    def __add__(self, other: Copied) -> Copied:
        return Copied(files=self.files + other.files, bytes=self.bytes + other.bytes)


def copy_generation(
    source: Store,
    target: Store,
    generation: Generation,
    *,
    files: Collection[str] | None = None,
    parts_at_once: int = 1,
    progress: Progress | None = None,
) -> Copied:
    """Copy a generation of `source` into the same folder of `target`, its manifest last.

    With `files`, only these shards; all parts are copied. Another generation that has this folder
    in `target` is replaced, and its files go. What it builds on is copied before. Memory: a few
    parts of an upload, times `parts_at_once`.

    Raises:
        IntegrityError: `source` has other bytes than were written, or lacks a generation on which
            this one builds; `target` got no manifest.
        FileNotFoundError: `source` lacks a file, or the generation has gone.
        StorageError: a store did not do what it was asked.
    """
    generation = Catalog(source).whole(generation)
    chain: dict[str, Generation] = {}
    _collect_bases(source, generation, chain)
    before = [
        _copy_alone(source, target, base, parts_at_once=parts_at_once)
        for base in sorted(chain.values(), key=lambda one: one.step)
    ]
    alone = _copy_alone(
        source, target, generation, files=files, parts_at_once=parts_at_once, progress=progress
    )
    return sum(before, alone)


def _collect_bases(store: Store, generation: Generation, found: dict[str, Generation]) -> None:
    """Add what a generation builds on, through whole chains, each once."""
    for base in bases_of(store, generation):
        if base.folder not in found:
            found[base.folder] = base
            _collect_bases(store, base, found)


def _copy_alone(
    source: Store,
    target: Store,
    generation: Generation,
    *,
    files: Collection[str] | None = None,
    parts_at_once: int,
    progress: Progress | None = None,
) -> Copied:
    """Copy a generation whose bases are there."""
    folder, manifest = generation.folder, generation.manifest
    replaced = manifest_in(target, folder)
    if replaced is not None and _same(replaced, manifest) and not lacks(target, generation, files):
        return Copied()
    there = sizes_in(target, folder)

    def copy_one(stored: StoredFile) -> Copied:
        return copy_part(
            source, target, folder, stored, files=files, there=there, progress=progress
        )

    copied = sum(_in_turn_or_at_once(copy_one, manifest.parts, parts_at_once), Copied())
    commit_copy(target, generation, files=files)
    if replaced is not None and not _same(replaced, manifest):
        sweep(target, folder)
    return copied


def copy_part(
    source: Store,
    target: Store,
    folder: str,
    stored: StoredFile,
    *,
    files: Collection[str] | None = None,
    there: Mapping[str, int] | None = None,
    pace: Pace | None = None,
    progress: Progress | None = None,
) -> Copied:
    """Copy the shards of one part that `target` lacks, by name and size, and then the part.

    `there` are the sizes in the folder of `target`, which is listed where they are not given.
    Raises what `copy_generation` raises.
    """
    there = sizes_in(target, folder) if there is None else there
    data = read_part_bytes(source, folder, stored)
    part = parse_part(data, file=f"{source.url}/{folder}/{stored.name}")
    target.make_folder(folder)
    copied = Copied()
    for number, shard in enumerate(part.files):
        if files is not None and shard.name not in files:
            continue
        # A file has its name only once all of its bytes are durable, so its size tells the rest.
        if there.get(shard.name) != shard.bytes:
            _send(source, target, folder, part, number, pace)
            copied += Copied(files=1, bytes=shard.bytes)
        if progress is not None:
            progress(shard.bytes)
    if not _has_part(target, folder, stored, there):
        put_document(target, f"{folder}/{stored.name}", data)
        copied += Copied(files=1, bytes=stored.bytes)
    if progress is not None:
        progress(stored.bytes)
    return copied


def commit_copy(
    target: Store, generation: Generation, *, files: Collection[str] | None = None
) -> None:
    """Publish the manifest of a copy, once everything that it names is there.

    Raises:
        StorageError: something is not, or has another size.
    """
    missing = _missing(target, generation.folder, generation.manifest, files)
    if missing is not None:
        raise StorageError(f"{target.url}/{generation.folder} is not complete: {missing}")
    forget(target, [generation.folder])  # it may describe another one that had this folder
    publish_manifest(target, generation.folder, generation.manifest)


def complete_copy(source: Store, target: Store, generation: Generation) -> None:
    """Copy the parts that `target` lacks, and publish the manifest: shards came another way.

    Raises what `copy_generation` raises.
    """
    folder, there = generation.folder, sizes_in(target, generation.folder)
    for stored in generation.manifest.parts:
        if not _has_part(target, folder, stored, there):
            data = read_part_bytes(source, folder, stored)
            put_document(target, f"{folder}/{stored.name}", data)
    publish_manifest(target, folder, generation.manifest)


def lacks(store: Store, generation: Generation, files: Collection[str] | None = None) -> str | None:
    """Why `store` does not hold this very generation whole, in words; None if it does.

    Its manifest is there, and so is every part with its digest and every shard that the parts
    name with its size (of `files` only, if given). Contents of shards are not read.

    Raises:
        StorageError: storage did not answer, which says nothing about what is there.
    """
    try:
        manifest = read_manifest(store, generation.folder)
    except FileNotFoundError:
        return "its manifest is not there"
    except (FormatError, IntegrityError) as error:
        return str(error)
    if (manifest.step, manifest.attempt) != generation.id:
        return f"its folder holds step {manifest.step}, attempt {manifest.attempt}"
    return _missing(store, generation.folder, manifest, files)


def bases_of(store: Store, generation: Generation) -> list[Generation]:
    """The generations in whose shards blocks of this one lie.

    Raises:
        IntegrityError: one is not there.
        FileNotFoundError: a part of `generation` is not.
    """
    if not generation.manifest.bases:
        return []
    parts = [read_part(store, generation.folder, one) for one in generation.manifest.parts]
    wanted = {(one.folder, one.attempt) for part in parts for one in part.borrowed}
    found = Catalog(store).read({folder for folder, _ in wanted})
    for folder, attempt in sorted(wanted):
        if folder not in found or found[folder].manifest.attempt != attempt:
            url = f"{store.url}/{folder}"
            reason = f"is gone, and step {generation.step} builds on it"
            raise IntegrityError(file=url, offset=0, reason=reason)
    return sorted(found.values(), key=lambda one: one.step)


def _missing(
    store: Store, folder: str, manifest: Manifest, files: Collection[str] | None
) -> str | None:
    shards = Shards(store)
    # Spares the reading of all the others.
    if (reason := missing_document(manifest.parts, shards.sizes(folder))) is not None:
        return reason
    for stored in manifest.parts:
        try:
            part = read_part(store, folder, stored)
        except FileNotFoundError:
            return f"{stored.name} is not there"
        except (FormatError, IntegrityError) as error:
            return str(error)
        if (reason := shards.lacking(folder, part, files)) is not None:
            return reason
    return None


def _send(
    source: Store, target: Store, folder: str, part: Part, number: int, pace: Pace | None
) -> None:
    shard = part.files[number]
    arrived = BlockReader(target, folder, part)
    for last in [False] * (_TRIES - 1) + [True]:
        try:
            passage = Passage(source, folder, part, number)
            read = passage.read if pace is None else _paced(passage.read, pace)
            target.upload(f"{folder}/{shard.name}", shard.bytes, read)
        except (IntegrityError, FormatError) as error:
            if last:
                raise
            logger.warning("read once more: %s", error)
            continue
        if (fault := fault_in(arrived, number)) is None:
            return
        if last:
            # It has the right size, so the next try would take it for one that arrived.
            target.delete(f"{folder}/{shard.name}")
            raise StorageError(f"what was sent did not arrive, and was removed: {fault}")
        logger.warning("sent once more: %s", fault)


def _has_part(store: Store, folder: str, stored: StoredFile, there: Mapping[str, int]) -> bool:
    """Whether a part is there, with its digest: one of the same size could never be committed."""
    if there.get(stored.name) != stored.bytes:
        return False
    try:
        read_part_bytes(store, folder, stored)
    except (IntegrityError, FileNotFoundError):
        return False
    return True


def _paced(read: Read, pace: Pace) -> Read:
    def paced(offset: int, target: memoryview) -> int:
        pace(len(target))
        return read(offset, target)

    return paced


def fault_in(reader: BlockReader, number: int) -> str | None:
    """What is wrong with a few blocks of what arrived: not every server checks what it is sent."""
    blocks = [i for i, block in enumerate(reader.part.blocks) if block.file == number]
    try:
        for index in {*blocks[:1], *blocks[-1:], *random.sample(blocks, min(1, len(blocks)))}:
            reader.read_stored(index, memoryview(bytearray(reader.part.blocks[index].bytes)))
    except (IntegrityError, FileNotFoundError) as error:
        return str(error)
    return None


def _same(one: Manifest, other: Manifest) -> bool:
    return (one.step, one.attempt) == (other.step, other.attempt)


def _in_turn_or_at_once(
    copy_one: Callable[[StoredFile], Copied], parts: Collection[StoredFile], at_once: int
) -> list[Copied]:
    if at_once < 2 or len(parts) < 2:
        return [copy_one(part) for part in parts]
    from concurrent.futures import ThreadPoolExecutor  # a writer starts without it

    pool = ThreadPoolExecutor(min(at_once, len(parts)), thread_name_prefix="ckpt-copy")
    try:
        return list(pool.map(copy_one, parts))
    finally:
        pool.shutdown(cancel_futures=True)
