"""Blocks back from storage: read, checked against their digests, decoded.

Not a byte is returned before its SHA-256 was compared. Knows stores and parts. Knows nothing of
tensors in memory; where a tensor lies in the raw space is for the caller to say.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property

from torch_ckpt.codecs.codec import CodecError
from torch_ckpt.codecs.names import codec_named
from torch_ckpt.errors import IntegrityError
from torch_ckpt.manifest.digest import sha256_hex, xxh3_hex
from torch_ckpt.manifest.entries import Block
from torch_ckpt.manifest.schema import Part
from torch_ckpt.storage.store import Store


class BlockReader:
    """Reads the blocks of one part. Threads may share it; each brings its own scratch memory."""

    def __init__(self, store: Store, folder: str, part: Part) -> None:
        self.part = part
        self._store, self._folder = store, folder
        self._names = [f"{folder}/{one.name}" for one in part.files]
        self._names += [f"{one.folder}/{one.name}" for one in part.borrowed]

    @cached_property
    def starts(self) -> list[int]:
        """First raw byte of every block, and the end of the last one."""
        return self.part.block_starts()

    def read(self, index: int, scratch: memoryview) -> memoryview:
        """The raw bytes of a block, in `scratch` or in memory of their own.

        `scratch` is a writable memoryview of bytes with room for the block's stored bytes. Bases
        are read and decoded on the way, one after the other, in memory of their own.

        Raises:
            IntegrityError: the stored bytes are not the ones that were written.
            FileNotFoundError: the shard is not there.
            ValueError: `scratch` is too small.
        """
        stored = self.read_stored(index, scratch)
        block = self.part.blocks[index]
        if block.codec == "raw":
            return stored  # the SHA-256 just checked covers these very bytes
        raw: memoryview | None = None
        for one in reversed(self.chain(index)):
            data = self._read_checked(index, one, memoryview(bytearray(one.bytes)))
            raw = self._decoded(index, one, data, raw)
        return self._decoded(index, block, stored, raw)

    def read_stored(self, index: int, scratch: memoryview) -> memoryview:
        """The stored bytes of a block, verified and not decoded; otherwise as `read`."""
        block = self.part.blocks[index]
        stored = scratch[: block.bytes]
        if len(stored) != block.bytes:
            raise ValueError(f"scratch has {len(stored)} bytes, block {index} has {block.bytes}")
        return self._read_checked(index, block, stored)

    def _read_checked(self, index: int, block: Block, stored: memoryview) -> memoryview:
        """The stored bytes of a block, or of a base of the block at `index`."""
        try:
            self._read_once(index, block, stored)
        except IntegrityError:
            if self._store.capabilities.files:
                raise
            self._read_once(index, block, stored)  # a bit may have flipped on a long way
        return stored

    def _read_once(self, index: int, block: Block, stored: memoryview) -> None:
        found = self._store.read_into(self._names[block.file], block.offset, stored)
        if found != block.bytes:
            reason = f"the file ends {block.bytes - found} bytes too early"
            raise self._damaged(index, block, reason, offset=block.offset + found)
        digest = sha256_hex(stored)
        if digest != block.sha256:
            reason = f"its SHA-256 is {digest[:12]}, the part says {block.sha256[:12]}"
            raise self._damaged(index, block, reason, offset=block.offset)

    def check_raw(self, index: int, raw: memoryview) -> None:
        """Check decoded bytes of a block that came another way than from storage.

        Raises:
            IntegrityError: they are not the ones that were written.
        """
        block = self.part.blocks[index]
        if xxh3_hex(raw) != block.xxh3:
            reason = "another rank read it well, but it did not arrive as it was sent"
            raise self._damaged(index, block, reason, offset=block.offset)

    def blocks_for(self, start: int, length: int) -> range:
        """The blocks that hold `length` bytes of the raw space from `start` on."""
        if length <= 0:
            return range(0)
        first = bisect_right(self.starts, start) - 1
        return range(first, bisect_left(self.starts, start + length))

    def tensors_in(self, index: int) -> list[str]:
        """The tensors that have bytes in a block, in the order of the raw space."""
        first = bisect_right(self._chunk_ends, self.starts[index])
        last = bisect_left(self._chunk_starts, self.starts[index + 1])
        names = [self.part.tensors[number].name for _, _, number in self._chunks[first:last]]
        return list(dict.fromkeys(names))

    def chain(self, index: int) -> list[Block]:
        """The blocks that a block is decoded against, nearest first."""
        chain: list[Block] = []
        base = self.part.blocks[index].base
        while base is not None:
            chain.append(self.part.bases[base])
            base = chain[-1].base
        return chain

    def files_of(self, index: int) -> set[int]:
        """The numbers of the files that a block needs, with those of its bases."""
        return {block.file for block in (self.part.blocks[index], *self.chain(index))}

    def relative(self, url: str) -> str:
        """A file as `url_of` gives it, seen from the generation's folder."""
        name = url.removeprefix(f"{self._store.url}/")
        return name.removeprefix(f"{self._folder}/")

    def url_of(self, block: Block) -> str:
        """The shard of a block, as a user would write it."""
        return f"{self._store.url}/{self._names[block.file]}"

    def _decoded(
        self, index: int, block: Block, stored: memoryview, base: memoryview | None
    ) -> memoryview:
        if block.codec == "raw":
            return stored
        try:
            codec = codec_named(block.codec)
            raw = codec.decode(stored, raw_bytes=block.raw_bytes, base=base)
        except CodecError as error:
            reason = f"codec {block.codec} refuses it: {error}"
            raise self._damaged(index, block, reason, offset=block.offset) from error
        # Neither a codec's fault nor a wrong base gets past this.
        if len(raw) != block.raw_bytes or xxh3_hex(raw) != block.xxh3:
            reason = f"codec {block.codec} did not give the bytes that were encoded"
            raise self._damaged(index, block, reason, offset=block.offset)
        return raw

    def _damaged(self, index: int, block: Block, reason: str, *, offset: int) -> IntegrityError:
        return IntegrityError(
            file=self.url_of(block), offset=offset, reason=reason, tensors=self.tensors_in(index)
        )

    # Only damage asks for these, and sorting 100,000 chunks is not free.
    @cached_property
    def _chunks(self) -> list[tuple[int, int, int]]:
        return sorted(
            (chunk.start, chunk.start + tensor.chunk_bytes(chunk), number)
            for number, tensor in enumerate(self.part.tensors)
            for chunk in tensor.chunks
            if tensor.chunk_bytes(chunk)
        )

    @cached_property
    def _chunk_starts(self) -> list[int]:
        return [start for start, _, _ in self._chunks]

    @cached_property
    def _chunk_ends(self) -> list[int]:
        return [end for _, end, _ in self._chunks]
