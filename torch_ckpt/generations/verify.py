"""Every byte of a generation against every digest that its documents give.

Reports all damage instead of stopping at the first. Knows stores and documents. Knows nothing of
what is to be done about damage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch_ckpt.errors import FormatError, IntegrityError, StorageError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.header import check_header, is_raw
from torch_ckpt.generations.read import BlockReader
from torch_ckpt.manifest.commit import read_manifest, read_part
from torch_ckpt.manifest.digest import xxh3_hex
from torch_ckpt.manifest.layout import MANIFEST
from torch_ckpt.manifest.schema import Part
from torch_ckpt.manifest.whole import check_parts
from torch_ckpt.storage.store import Store

Progress = Callable[[int, int], None]
"""Called with the bytes checked so far and in all; from one thread at a time."""

_Failure = (IntegrityError, FormatError, StorageError, FileNotFoundError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """One place in one file that is not as it was written."""

    file: str
    """Name in the generation's folder; with a folder of its own if it is in another one."""
    offset: int
    tensors: tuple[str, ...]
    """What cannot be trusted because of it; empty for documents."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a verification found."""

    generation: Generation
    damages: tuple[Damage, ...]
    bytes_checked: int
    """Of shards and documents."""

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages


@dataclass(kw_only=True)
class _Tally:
    """What threads have found so far."""

    total: int
    progress: Progress | None
    done: int = 0
    damages: list[Damage] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, checked: int, damage: Damage | None = None) -> None:
        with self.lock:
            self.done += checked
            if damage is not None:
                self.damages.append(damage)
            if self.progress is not None:
                self.progress(self.done, self.total)


def verify(
    store: Store,
    generation: Generation,
    *,
    progress: Progress | None = None,
    threads: int = 4,
) -> Report:
    """Check the manifest, the parts, and every block of every shard; report all damage.

    Memory stays at one block a thread. What storage cannot read counts as damage here.

    Raises:
        GenerationNotFound: an index named it, and it is not there any more.
    """
    generation = Catalog(store).whole(generation)
    folder = generation.folder
    documents = sum(part.bytes for part in generation.manifest.parts)
    tally = _Tally(total=generation.manifest.bytes + documents, progress=progress)
    parts = _checked_parts(store, generation, tally)
    sizes = {entry.name: entry.bytes for entry in store.entries(folder)}
    scratch = threading.local()
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="ckpt-verify") as pool:
        for part in parts:
            reader = BlockReader(store, folder, part)
            indices = _checked_files(store, folder, reader, sizes, tally)
            indices = _with_borrowed(store, reader, indices, tally)
            for checked, damage in pool.map(
                lambda index, reader=reader: _check_block(reader, index, scratch), indices
            ):
                tally.add(checked, damage)
    ordered = sorted(tally.damages, key=lambda damage: (damage.file, damage.offset))
    return Report(generation=generation, damages=tuple(ordered), bytes_checked=tally.done)


def _checked_parts(store: Store, generation: Generation, tally: _Tally) -> list[Part]:
    folder, manifest = generation.folder, generation.manifest
    try:
        if read_manifest(store, folder) != manifest:
            tally.add(0, _damage(MANIFEST, "it was replaced since it was listed"))
    except _Failure as error:
        tally.add(0, _damage(MANIFEST, _reason(error)))
    parts = []
    for stored in manifest.parts:
        try:
            parts.append(read_part(store, folder, stored))
        except _Failure as error:
            tally.add(0, _damage(stored.name, _reason(error), getattr(error, "offset", 0)))
        else:
            tally.add(stored.bytes)
    if len(parts) == len(manifest.parts):
        try:
            check_parts(manifest, parts, generation.url)
        except FormatError as error:
            tally.add(0, _damage(MANIFEST, error.reason))
    return parts


def _checked_files(
    store: Store, folder: str, reader: BlockReader, sizes: dict[str, int], tally: _Tally
) -> list[int]:
    """Check the files of a part as files; the blocks that are worth reading."""
    readable: list[int] = []
    blocks = reader.part.blocks
    for number, file in enumerate(reader.part.files):
        indices = [index for index, block in enumerate(blocks) if block.file == number]
        size = sizes.get(file.name)
        if size != file.bytes:
            reason = "it is missing or no regular file"
            if size is not None:
                reason = f"it has {size} bytes, the part says {file.bytes}"
            end = min(size or 0, file.bytes)
            lost = [i for i in indices if blocks[i].offset + blocks[i].bytes > end]
            names = {name: None for i in lost for name in reader.tensors_in(i)}
            tally.add(0, Damage(file=file.name, offset=end, tensors=tuple(names), reason=reason))
            indices = [i for i in indices if blocks[i].offset + blocks[i].bytes <= end]
        if size is not None and is_raw(reader, number):
            try:
                tally.add(check_header(store, folder, reader, number))
            except _Failure as error:
                tally.add(0, _damage(file.name, _reason(error)))
        readable += indices
    return readable


def _with_borrowed(store: Store, reader: BlockReader, own: list[int], tally: _Tally) -> list[int]:
    """The blocks worth reading with those in other generations, where missing files are reported.

    Those are read as `own` ones are, but do not count as bytes of this generation.
    """
    part, missing = reader.part, set()
    there = Catalog(store).read({one.folder for one in part.borrowed})
    for number, one in enumerate(part.borrowed, len(part.files)):
        sizes = {entry.name: entry.bytes for entry in store.entries(one.folder)}
        committed = one.folder in there and there[one.folder].manifest.attempt == one.attempt
        size = sizes.get(one.name) if committed else None
        if size == one.bytes:
            continue
        missing.add(number)
        needing = [i for i in range(len(part.blocks)) if number in reader.files_of(i)]
        names = {name: None for i in needing for name in reader.tensors_in(i)}
        what = "is gone" if size is None else f"has {size} bytes instead of {one.bytes}"
        reason = f"step {one.step}, on which it builds, {what}"
        file = f"{one.folder}/{one.name}"
        tally.add(0, Damage(file=file, offset=0, tensors=tuple(names), reason=reason))
    borrowed = [i for i, block in enumerate(part.blocks) if block.file >= len(part.files)]
    return [i for i in [*own, *borrowed] if not missing.intersection(reader.files_of(i))]


def _check_block(
    reader: BlockReader, index: int, scratch: threading.local
) -> tuple[int, Damage | None]:
    block = reader.part.blocks[index]
    own = block.bytes if block.file < len(reader.part.files) else 0
    url = reader.url_of(block)
    buffer: bytearray = getattr(scratch, "buffer", bytearray())
    if len(buffer) < block.bytes:
        scratch.buffer = buffer = bytearray(block.bytes)
    try:
        raw = reader.read(index, memoryview(buffer))
        if xxh3_hex(raw) == block.xxh3:
            return own, None
        reason, offset = "its XXH3 is not the one in the part", block.offset
    except _Failure as error:
        reason, offset = _reason(error), getattr(error, "offset", block.offset)
        url = getattr(error, "file", url)  # it may be a base that is damaged
    tensors = tuple(reader.tensors_in(index))
    return 0, Damage(file=reader.relative(url), offset=offset, tensors=tensors, reason=reason)


def _damage(file: str, reason: str, offset: int = 0, tensors: Sequence[str] = ()) -> Damage:
    return Damage(file=file, offset=offset, tensors=tuple(tensors), reason=reason)


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    return getattr(error, "reason", None) or str(error)
