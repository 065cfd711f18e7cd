"""Parts on their way into an object store, in a fixed amount of memory.

Knows how obstore takes parts: from an iterator, without copying, holding each until it is sent.
Knows nothing of requests, names or errors.
"""

from __future__ import annotations

import hashlib
import mmap
import queue
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch_ckpt.storage.parts import check_digest, fill
from torch_ckpt.storage.store import Read

PART_BYTES = 16 << 20
_MAX_PARTS = 9_990
"""S3 and GCS allow 10,000."""
_MEMORY_BYTES = 128 << 20
_AHEAD = 2
"""Parts that are read while others are sent."""


class Shape:
    """In how many parts an object of `size` bytes travels, and how many are sent at once."""

    def __init__(self, size: int) -> None:
        needed = -(-size // _MAX_PARTS)
        # Whole mebibytes: some servers want equal parts of a round size.
        self.part_bytes = max(PART_BYTES, -(-needed // (1 << 20)) << 20)
        # A part larger than half of the memory still needs one to be sent and one to be filled.
        self.buffers = max(2, _MEMORY_BYTES // self.part_bytes)
        # obstore sends this many and holds one more.
        self.concurrency = max(1, self.buffers - 1 - _AHEAD)

    def single(self, size: int) -> bool:
        return size <= self.part_bytes


class Buffers:
    """A fixed number of buffers, each back as soon as nobody can see what was lent out of it."""

    def __init__(self, count: int, size: int) -> None:
        self._size, self._unborn = size, count
        # Its `put` may be called while a `get` is: garbage is collected at any moment.
        self._free: queue.SimpleQueue[mmap.mmap | None] = queue.SimpleQueue()

    def take(self, *, wait: bool) -> mmap.mmap | None:
        """A buffer; None if all are lent out and `wait` is false, or after `close`."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            if self._unborn:
                self._unborn -= 1
                return mmap.mmap(-1, self._size)
            return self._free.get() if wait else None

    def lend(self, memory: mmap.mmap, length: int) -> memoryview:
        """The first bytes of a buffer, which comes back when this very view is gone."""
        view = memoryview(memory)[:length]
        weakref.finalize(view, self._free.put, memory).atexit = False
        return view

    def close(self) -> None:
        """Wake whoever waits for a buffer."""
        self._free.put(None)


def parts(
    size: int, read: Read, shape: Shape, *, sha256: str | None, where: str
) -> Generator[memoryview, None, None]:
    """The parts of `size` bytes in order, some read ahead; the last one only if `sha256` fits."""
    buffers = Buffers(shape.buffers, min(shape.part_bytes, max(size, 1)))
    starts = iter(range(0, size, shape.part_bytes))
    digest = hashlib.sha256()

    def filled(memory: mmap.mmap, start: int) -> tuple[mmap.mmap, int]:
        length = min(shape.part_bytes, size - start)
        # Not released by hand: an error that is on its way may still hold a view of it.
        fill(read, start, memoryview(memory)[:length], where=where)
        return memory, length

    ahead: deque[Future[tuple[mmap.mmap, int]]] = deque()
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="upload") as pool:
        try:
            sent = 0
            while sent < size:
                # Waits for a buffer only when nothing is under way that could be sent first.
                while len(ahead) <= _AHEAD and (memory := buffers.take(wait=not ahead)):
                    if (start := next(starts, None)) is None:
                        break
                    ahead.append(pool.submit(filled, memory, start))
                memory, length = ahead.popleft().result()
                sent += length
                if sha256 is not None:
                    digest.update(memoryview(memory)[:length])
                    if sent == size:
                        check_digest(digest, sha256, where=where)
                yield buffers.lend(memory, length)
        finally:
            for future in ahead:
                future.cancel()


class Remembering:
    """An iterator that keeps what its source raised, which tells it from what a server did."""

    def __init__(self, source: Iterator[memoryview]) -> None:
        self._source = source
        self.bytes = 0
        """What it has brought so far."""
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[memoryview]:
        return self

    def __next__(self) -> memoryview:
        try:
            part = next(self._source)
        except StopIteration:
            raise
        except BaseException as error:
            self.failure = error
            raise
        self.bytes += len(part)
        return part
