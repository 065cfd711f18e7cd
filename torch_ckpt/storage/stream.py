"""An object that is sent in parallel parts while it is still being written, in order.

Knows parts and threads. Knows nothing of requests: it is given what sends.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable, Iterator

from torch_ckpt.errors import StorageError
from torch_ckpt.storage.outgoing import Buffers, Shape


class Stream:
    """A sink that copies what it is given into parts, which a thread of its own sends."""

    def __init__(
        self,
        *,
        where: str,
        size: int,
        exact: bool = True,
        shape: Shape,
        send: Callable[[Iterator[memoryview]], None],
    ) -> None:
        self._where, self._size, self._exact = where, size, exact
        self._shape, self._send = shape, send
        self._buffers = Buffers(shape.buffers, min(shape.part_bytes, max(size, 1)))
        self._memory: mmap.mmap | None = None
        self._filled = 0
        self._given = 0
        self._done = False
        # Bounded by the number of buffers.
        self._parts: queue.SimpleQueue[memoryview | BaseException | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        # Daemon: a sink that nobody finishes must not keep its process.
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def write_at(self, offset: int, data: memoryview) -> None:
        data = data.cast("B")
        if self._done or offset != self._given or offset + len(data) > self._size:
            raise StorageError(
                f"cannot write {len(data)} bytes at {offset} of {self._where}: "
                f"{self._given} of its {self._size} bytes are written, and they go in order"
            )
        while data:
            if self._memory is None and (memory := self._buffers.take(wait=True)) is not None:
                self._memory = memory
            if self._failure is not None or self._memory is None:
                self._raise()
                return
            count = min(len(data), self._shape.part_bytes - self._filled)
            self._memory[self._filled : self._filled + count] = data[:count]
            self._filled, self._given = self._filled + count, self._given + count
            data = data[count:]
            if self._filled == self._shape.part_bytes or self._given == self._size:
                self._pass_on(self._memory)

    def _pass_on(self, memory: mmap.mmap) -> None:
        self._parts.put(self._buffers.lend(memory, self._filled))
        self._memory, self._filled = None, 0

    def finish(self) -> None:
        if self._memory is not None and not self._exact:
            self._pass_on(self._memory)
        elif self._exact and self._given != self._size:
            raise StorageError(
                f"{self._where} was given {self._given} of {self._size} bytes; save again"
            )
        self._parts.put(None)
        self._thread.join()
        self._raise()
        self._done = True

    def abandon(self) -> None:
        if self._done:
            return
        self._done = True
        self._parts.put(_Abandoned())  # what is sent is dropped, since its source failed
        self._thread.join()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._send(self._source())
        except BaseException as error:
            self._failure = error
        finally:
            self._buffers.close()

    def _source(self) -> Iterator[memoryview]:
        while (part := self._parts.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield part
            del part  # or the buffer would not come back before the next one was there


class _Abandoned(Exception):
    """The writer of an object gave it up."""
