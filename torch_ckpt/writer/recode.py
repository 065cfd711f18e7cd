"""A generation on its way into a tier that stores it in another codec, without loss.

Blocks are read and verified in one store, encoded where that pays, and laid into a shard of the
other; the part that describes it is new, the generation is the same one. Knows stores, parts and
codecs. Knows nothing of which generations go where, or of who else copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
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

    def send(self, folder: str, stored: StoredFile, there: Collection[str]) -> bool:
        """Send one part with its shard, unless the target has the part, which comes last.

        False if it is encoded already: then it is for the caller to send as it is.

        Raises:
            IntegrityError: the source has other bytes than were written.
            FileNotFoundError: the source lacks a file.
            StorageError: a store did not do what it was asked.
        """
        if stored.name in there:
            return True
        part = read_part(self.source, folder, stored)
        if part.encoded:
            return False
        self.target.make_folder(folder)
        self._publish(folder, self._sent(folder, part) if part.blocks else part)
        return True

    def collect(self, folder: str, manifest: Manifest, there: dict[str, int]) -> Manifest | None:
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

    def _vote(self, folder: str, name: str) -> tuple[StoredFile, Vote] | None:
        """What a part says, if it says the same twice: its digest is that of what was read."""
        found = collect_vote(self.target, folder, name)
        if self.target.capabilities.files or found is None:
            return found
        return found if found == collect_vote(self.target, folder, name) else None

    def _publish(self, folder: str, part: Part) -> None:
        arrived = BlockReader(self.target, folder, part)
        for number, file in enumerate(part.files):
            if (fault := fault_in(arrived, number)) is not None:
                self.target.delete(f"{folder}/{file.name}")
                raise StorageError(f"what was sent did not arrive, and was removed: {fault}")
        publish_part(self.target, folder, part)

    def _sent(self, folder: str, part: Part) -> Part:
        reader = BlockReader(self.source, folder, part)
        name = shard_name(part.rank, part.attempt, encoded=True)
        laid = Laid(self.target, f"{folder}/{name}", reader.starts[-1])
        self.target.delete(f"{folder}/{name}")  # of a promotion that was cut before its part
        blocks = []
        try:
            for coded in self._coded(reader):
                self.pace(len(coded.data or b""))
                blocks.append(laid.add(coded))
                self._speed.note_coded(coded)
            files = laid.finish()
        except BaseException:
            laid.abandon()
            raise
        self._speed.note_stored(laid.bytes, laid.seconds)
        return replace(part, files=files, blocks=tuple(blocks))

    def _coded(self, reader: BlockReader) -> Iterator[Coded]:
        lossless, dtypes = Lossless(speed=self._speed), _dtypes(reader)

        def code(index: int) -> Coded:
            block = reader.part.blocks[index]
            raw = reader.read(index, memoryview(bytearray(block.bytes)))
            if len(raw) != block.raw_bytes:
                raise StorageError(f"{reader.url_of(block)} gave {len(raw)} bytes for a block")
            extent = Extent(reader.starts[index], block.raw_bytes)
            return lossless.encode(extent, raw, dtypes[index], self.codec)

        work = (functools.partial(code, index) for index in range(len(reader.part.blocks)))
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
