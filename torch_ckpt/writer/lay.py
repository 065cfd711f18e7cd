"""Streams of unknown length, laid back to back in one file. Knows stores and pages."""

from __future__ import annotations

import mmap
import time

from torch_ckpt.manifest.entries import BLOCK_BYTES, Block
from torch_ckpt.manifest.schema import StoredFile
from torch_ckpt.storage.store import Sink, Store
from torch_ckpt.writer.code import Coded


class Laid:
    """An encoded shard that grows; there is no file until it has a byte."""

    def __init__(self, store: Store | None, name: str, limit: int) -> None:
        """`name` is relative to the root; there will be at most `limit` bytes.

        Without a store nothing is written, and `finish` says what the file would be.
        """
        self._store, self._name, self._limit = store, name, limit
        self._sink: Sink | None = None
        # Whole pages, as direct writes want them.
        self._page_aligned = mmap.mmap(-1, BLOCK_BYTES)
        self._filled = 0
        self._written = 0
        self.seconds = 0.0
        """Spent in storage."""

    @property
    def bytes(self) -> int:
        """Appended so far."""
        return self._written + self._filled

    def append(self, data: memoryview) -> int:
        """Add bytes at the end; where they begin."""
        offset = self.bytes
        while data:
            count = min(len(data), BLOCK_BYTES - self._filled)
            self._page_aligned[self._filled : self._filled + count] = data[:count]
            self._filled, data = self._filled + count, data[count:]
            if self._filled == BLOCK_BYTES:
                self._flush()
        return offset

    def add(self, coded: Coded, base: int | None = None) -> Block:
        """Append a block that is stored here; what a part says of it."""
        data = memoryview(coded.data or b"")
        return Block(
            file=0,
            offset=self.append(data),
            bytes=len(data),
            raw_bytes=coded.extent.bytes,
            sha256=coded.sha256,
            xxh3=coded.xxh3,
            codec=coded.codec,
            base=base,
        )

    def finish(self) -> tuple[StoredFile, ...]:
        """Make all of it durable; the file, if there is one."""
        if self._filled:
            self._flush()
        if not self._written:
            return ()
        began = time.monotonic()
        if self._sink is not None:
            self._sink.finish()
        self.seconds += time.monotonic() - began
        return (StoredFile(name=self._name.rpartition("/")[2], bytes=self._written),)

    def abandon(self) -> None:
        """Drop the file."""
        if self._sink is not None:
            self._sink.abandon()

    def _flush(self) -> None:
        began = time.monotonic()
        if self._store is not None:
            if self._sink is None:
                self._sink = self._store.create(self._name, self._limit, exact=False)
            self._sink.write_at(self._written, memoryview(self._page_aligned)[: self._filled])
        self._written, self._filled = self._written + self._filled, 0
        self.seconds += time.monotonic() - began
