"""Bytes from a source to a sink in parts, a few of them in memory at a time.

Knows sources that fill memory and sinks. Knows nothing of stores or names.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from typing import Protocol

from torch_ckpt.errors import StorageError
from torch_ckpt.storage.store import Read, Sink

_PART_BYTES = 8 << 20
_THREADS = 4


class _Hash(Protocol):
    def hexdigest(self) -> str: ...


def fill(read: Read, offset: int, target: memoryview, *, where: str) -> None:
    """Have `read` fill all of `target`.

    Raises:
        StorageError: the source ends before that.
    """
    count = read(offset, target)
    if count != len(target):
        raise StorageError(
            f"the source of {where} ends at byte {offset + count}, which is "
            f"{len(target) - count} bytes too early; it changed or is damaged"
        )


def check_digest(digest: _Hash, sha256: str | None, *, where: str) -> None:
    """Refuse bytes of another digest than was announced, if one was."""
    if sha256 is not None and digest.hexdigest() != sha256:
        raise StorageError(
            f"the source of {where} has sha256 {digest.hexdigest()[:12]}, not {sha256[:12]}; "
            "it changed or is damaged"
        )


def fill_sink(
    sink: Sink, size: int, read: Read, *, sha256: str | None, where: str, in_order: bool = False
) -> None:
    """Write the `size` bytes that `read` brings to `sink`, side by side unless order matters."""
    starts = iter(range(0, size, _PART_BYTES))
    digest = hashlib.sha256()
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        # Page-aligned, so that a sink can write past the page cache; each thread has its own.
        # Never closed by hand: an error that is on its way may still hold a view of it.
        buffer = memoryview(mmap.mmap(-1, _PART_BYTES))
        while not failures:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            part = buffer[: min(_PART_BYTES, size - start)]
            fill(read, start, part, where=where)
            if sha256 is not None:
                digest.update(part)
            sink.write_at(start, part)

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = 1 if in_order or sha256 is not None else min(_THREADS, -(-size // _PART_BYTES))
    others = [threading.Thread(target=run, name="upload") for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()
    if failures:
        raise failures[0]
    check_digest(digest, sha256, where=where)
