"""A stored file on its way to another store: every block is checked as it passes.

The other store asks for whatever pieces suit it, in any order and from several threads, so a block
may pass in several pieces. Knows stores and parts. Knows nothing of where the bytes go.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Any

from torch_ckpt.errors import IntegrityError
from torch_ckpt.generations.header import checked_header, is_raw
from torch_ckpt.generations.read import BlockReader
from torch_ckpt.manifest.digest import sha256_hex, xxh3_hex
from torch_ckpt.manifest.schema import Part
from torch_ckpt.storage.store import Store


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of the file that one digest covers: a block, or the header."""

    start: int
    end: int
    sha256: str
    block: int | None


@dataclass(slots=True)
class _Pieces:
    """A span that passes in several pieces: hashed from its start, early ones wait."""

    at: int
    """First byte that was not hashed yet."""
    digest: Any = field(default_factory=hashlib.sha256)
    waiting: dict[int, bytes] = field(default_factory=dict)
    marks: dict[tuple[int, int], str] = field(default_factory=dict)
    """XXH3 of what has passed: a piece that is asked for again must not be another one."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Passage:
    """One file of a part, for one upload; `read` is what `Store.upload` asks for.

    An upload that has read the whole file has read nothing but what was written, or `read` has
    raised. Bytes that no block covers pass as they are, since no reader uses them. Memory: at
    most one block for each piece that comes before its predecessor.
    """

    def __init__(self, store: Store, folder: str, part: Part, number: int) -> None:
        """Raises FormatError or FileNotFoundError where the header of a raw shard is damaged."""
        self._store, self._reader = store, BlockReader(store, folder, part)
        self._file = part.files[number]
        self._name = f"{folder}/{self._file.name}"
        spans = [
            _Span(block.offset, block.offset + block.bytes, block.sha256, index)
            for index, block in enumerate(part.blocks)
            if block.file == number
        ]
        if is_raw(self._reader, number):
            data_start, sha256 = checked_header(store, folder, self._reader, number)
            spans.append(_Span(0, data_start, sha256, None))
        self._spans = sorted(spans, key=lambda span: span.start)
        self._starts = [span.start for span in self._spans]
        self._ends = [span.end for span in self._spans]
        self._pieces: dict[int, _Pieces] = {}
        self._lock = threading.Lock()

    def read(self, offset: int, target: memoryview) -> int:
        """Fill `target` from `offset` on.

        Raises:
            IntegrityError: the bytes of a block that ends here are not the ones that were written.
        """
        target = target.cast("B")
        count = self._store.read_into(self._name, offset, target)
        if count < len(target) and offset + count < self._file.bytes:
            missing = self._file.bytes - offset - count
            raise self._damaged(None, offset + count, f"the file ends {missing} bytes too early")
        first = bisect_right(self._ends, offset)
        last = bisect_left(self._starts, offset + count)
        # Backwards: whoever reads what follows needs the beginning of our last block, and what we
        # need of the one before us is ready by then.
        for number in range(last - 1, first - 1, -1):
            span = self._spans[number]
            start, end = max(span.start, offset), min(span.end, offset + count)
            piece = target[start - offset : end - offset]
            if len(piece) == span.end - span.start:
                self._compare(span, sha256_hex(piece))
            else:
                self._pass(number, start, piece)
        return count

    def _pass(self, number: int, start: int, piece: memoryview) -> None:
        span, end = self._spans[number], start + len(piece)
        with self._lock:
            pieces = self._pieces.setdefault(number, _Pieces(span.start))
        mark = xxh3_hex(piece)
        with pieces.lock:
            known = pieces.marks.get((start, end))
            if known is not None:
                if known != mark:
                    raise self._damaged(span, start, "it reads differently the second time")
                return
            overlaps = any(start < other and first < end for first, other in pieces.marks)
            pieces.marks[start, end] = mark
            if overlaps:
                self._compare_with_whole(span, pieces, start, piece)
            elif start > pieces.at:
                pieces.waiting[start] = bytes(piece)
            else:
                self._hash(span, pieces, piece)

    def _hash(self, span: _Span, pieces: _Pieces, piece: memoryview) -> None:
        pieces.digest.update(piece)
        pieces.at += len(piece)
        while (early := pieces.waiting.pop(pieces.at, None)) is not None:
            pieces.digest.update(early)
            pieces.at += len(early)
        if pieces.at == span.end:
            self._compare(span, pieces.digest.hexdigest())

    def _compare_with_whole(
        self, span: _Span, pieces: _Pieces, start: int, piece: memoryview
    ) -> None:
        """For uploads that cut the file anew when they try again: pieces that overlap others."""
        whole = memoryview(bytearray(span.end - span.start))
        self._store.read_into(self._name, span.start, whole)
        self._compare(span, sha256_hex(whole))
        passed = {**pieces.waiting, start: piece}
        same = all(
            whole[first - span.start :][: len(data)] == data for first, data in passed.items()
        )
        if pieces.at < span.end:
            hashed = sha256_hex(whole[: pieces.at - span.start])
            same = same and hashed == pieces.digest.hexdigest()
        if not same:
            raise self._damaged(span, start, "it reads differently the second time")
        pieces.at = span.end
        pieces.waiting.clear()

    def _compare(self, span: _Span, found: str) -> None:
        if found != span.sha256:
            whose = "the header says" if span.block is None else "the part says"
            reason = f"its SHA-256 is {found[:12]}, {whose} {span.sha256[:12]}"
            raise self._damaged(span, span.start, reason)

    def _damaged(self, span: _Span | None, offset: int, reason: str) -> IntegrityError:
        block = None if span is None else span.block
        tensors = [] if block is None else self._reader.tensors_in(block)
        file = f"{self._store.url}/{self._name}"
        return IntegrityError(file=file, offset=offset, reason=reason, tensors=tensors)
