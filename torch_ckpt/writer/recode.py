"""A generation on its way into a tier that stores it in another codec, without loss.

Blocks are read and verified in one store, encoded where that pays, and laid into a shard of the
other; the part that describes it is new, the generation is the same one. Knows stores, parts and
codecs. Knows nothing of which generations go where, or of who else copies.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from torch_ckpt.errors import StorageError
from torch_ckpt.generations.copy import fault_in
from torch_ckpt.generations.read import BlockReader
from torch_ckpt.manifest.blocks import Extent
from torch_ckpt.manifest.commit import collect_vote, publish_part, read_part
from torch_ckpt.manifest.layout import shard_name
from torch_ckpt.manifest.schema import Manifest, Part, StoredFile, Vote
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.ahead import in_order
from torch_ckpt.writer.code import Coded, Lossless, Speed
from torch_ckpt.writer.lay import Laid

_AHEAD = 6
"""Blocks read and encoded ahead of the one that is sent."""
_SAMPLES = 5
"""Blocks of a part that tell `auto` what encoding it would give."""
_MEASURED_FOR_S = 3600.0
"""How long `auto` goes by what a way has brought; then a part goes raw again."""
_MEASURES_BYTES = 1 << 20
"""Fewer, such as the part of a shard that was there, take as long as a request takes."""
_THREADS = 4
_READERS = 16
"""Parts that are read at once."""


@dataclass
class Recoder:
    """Sends parts in a codec of the target's."""

    source: Store
    target: Store
    codec: str
    pace: Callable[[int], None]
    """Told of bytes before they are sent; may wait, or raise to end it."""
    _speed: Speed = field(default_factory=Speed)
    _measured_at: float = -math.inf

    def note_sent(self, size: int, seconds: float) -> None:
        """So many bytes went to the target as they are: what `auto` judges by.

        What is encoded on the way tells less: its bytes may have waited for a codec.
        """
        if size < _MEASURES_BYTES:
            return
        self._speed.stored, self._speed.stored_s = size, seconds
        self._measured_at = time.monotonic()

    def send(self, folder: str, stored: StoredFile, there: Mapping[str, int]) -> bool:
        """Send one part with its shard, unless the target has the part, which comes last.

        `there` are the sizes of what it has. A shard that arrived is not sent again: blocks are
        encoded anew, by rules that give the same bytes, and compared.

        False if it is for the caller to send as it is: it is encoded already, or `auto` finds that
        it would not be there sooner. That takes a measured way, so what goes first goes raw.

        Raises:
            IntegrityError: the source has other bytes than were written.
            FileNotFoundError: the source lacks a file.
            StorageError: a store did not do what it was asked.
        """
        if stored.name in there and self._is_whole(folder, stored.name, there):
            return True
        part = read_part(self.source, folder, stored)
        if part.encoded or not part.blocks or not self._pays(folder, part, there):
            return False
        self.target.make_folder(folder)
        laid = self._there(folder, part, there)
        if laid is None:
            laid = self._sent(folder, part)
            self._prove(folder, laid)
        publish_part(self.target, folder, laid)
        return True

    def collect(self, folder: str, manifest: Manifest, there: Mapping[str, int]) -> Manifest | None:
        """The manifest of what the target has; None while a part or a shard is missing."""
        names = [stored.name for stored in manifest.parts]
        if not set(names) <= there.keys():
            return None
        with ThreadPoolExecutor(_READERS, thread_name_prefix="ckpt-votes") as pool:
            found = list(pool.map(lambda name: self._vote(folder, name), names))
        parts, total = [], 0
        for vote in found:
            if vote is None or any(there.get(one.name) != one.bytes for one in vote[1].files):
                return None
            parts.append(vote[0])
            total += sum(one.bytes for one in vote[1].files)
        return replace(manifest, parts=tuple(parts), bytes=total)

    def _is_whole(self, folder: str, name: str, there: Mapping[str, int]) -> bool:
        """Whether the shards of a part that is there are there as well."""
        vote = self._vote(folder, name)
        return vote is not None and all(there.get(one.name) == one.bytes for one in vote[1].files)

    def _vote(self, folder: str, name: str) -> tuple[StoredFile, Vote] | None:
        """What a part says, if it says the same twice: its digest is that of what was read."""
        found = collect_vote(self.target, folder, name)
        if self.target.capabilities.files or found is None:
            return found
        return found if found == collect_vote(self.target, folder, name) else None

    def _pays(self, folder: str, part: Part, there: Collection[str]) -> bool:
        """Whether to encode a part; `auto` encodes a few of its blocks to learn that."""
        if self.codec != "auto" or shard_name(part.rank, part.attempt, encoded=True) in there:
            return True
        is_old = time.monotonic() - self._measured_at > _MEASURED_FOR_S
        if is_old or any(file.name in there for file in part.files):
            return False
        reader = BlockReader(self.source, folder, part)
        count = len(part.blocks)
        some = sorted({number * (count - 1) // (_SAMPLES - 1) for number in range(_SAMPLES)})
        coded = list(self._coded(reader, some))
        for one in coded:
            self._speed.note_coded(one)
        return self._speed.pays(
            sum(one.extent.bytes for one in coded) / sum(len(one.data or b"") for one in coded)
        )

    def _there(self, folder: str, part: Part, there: Mapping[str, int]) -> Part | None:
        """The part of a shard that arrived before its part could; None if none did."""
        size = there.get(shard_name(part.rank, part.attempt, encoded=True))
        if size is None:
            return None
        laid = self._encoded(folder, part, None)
        if [file.bytes for file in laid.files] != [size]:
            return None
        fault = fault_in(BlockReader(self.target, folder, laid), 0)
        return laid if fault is None else None

    def _prove(self, folder: str, part: Part) -> None:
        arrived = BlockReader(self.target, folder, part)
        for number, file in enumerate(part.files):
            if (fault := fault_in(arrived, number)) is not None:
                self.target.delete(f"{folder}/{file.name}")
                raise StorageError(f"what was sent did not arrive, and was removed: {fault}")

    def _sent(self, folder: str, part: Part) -> Part:
        name = shard_name(part.rank, part.attempt, encoded=True)
        self.target.delete(f"{folder}/{name}")  # of a promotion that was cut before its part
        return self._encoded(folder, part, self.target)

    def _encoded(self, folder: str, part: Part, target: Store | None) -> Part:
        """The part of a shard that is laid into `target`, or only thought out without one."""
        reader = BlockReader(self.source, folder, part)
        name = shard_name(part.rank, part.attempt, encoded=True)
        laid = Laid(target, f"{folder}/{name}", reader.starts[-1])
        blocks = []
        try:
            for coded in self._coded(reader, range(len(part.blocks))):
                if target is not None:
                    self.pace(len(coded.data or b""))
                blocks.append(laid.add(coded))
                self._speed.note_coded(coded)
            files = laid.finish()
        except BaseException:
            laid.abandon()
            raise
        return replace(part, files=files, blocks=tuple(blocks))

    def _coded(self, reader: BlockReader, blocks: Iterable[int]) -> Iterator[Coded]:
        lossless, dtypes = Lossless(speed=self._speed), _dtypes(reader)

        def code(index: int) -> Coded:
            block = reader.part.blocks[index]
            raw = reader.read(index, memoryview(bytearray(block.bytes)))
            if len(raw) != block.raw_bytes:
                raise StorageError(f"{reader.url_of(block)} gave {len(raw)} bytes for a block")
            extent = Extent(reader.starts[index], block.raw_bytes)
            return lossless.encode(extent, raw, dtypes[index], "zstd")

        work = (functools.partial(code, index) for index in blocks)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-recode") as pool:
            yield from in_order(pool, work, _AHEAD)


def _dtypes(reader: BlockReader) -> list[str]:
    """The dtype of each block, by the tensor in which it begins."""
    chunks = sorted(
        (chunk.start, tensor.dtype)
        for tensor in reader.part.tensors
        for chunk in tensor.chunks
        if tensor.chunk_bytes(chunk)
    )
    found, position = [], 0
    for start in reader.starts[:-1]:
        while position + 1 < len(chunks) and chunks[position + 1][0] <= start:
            position += 1
        found.append(chunks[position][1])
    return found
