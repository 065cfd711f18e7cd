"""What a shard takes over from the generation before it, as a part says it.

Blocks of the base are named where they lie, however many generations back that is, so that a
reader needs no other part. Knows parts. Knows nothing of stores or codecs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from torch_ckpt.codecs.names import NEED_BASE
from torch_ckpt.manifest.blocks import Placed
from torch_ckpt.manifest.entries import Block
from torch_ckpt.manifest.schema import Borrowed, Part, StoredFile
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.shard import Written


@dataclass(frozen=True, kw_only=True)
class Base:
    """The last snapshot of this rank, still in its slab, and what is stored of it."""

    job: Job
    placed: list[Placed]
    slab: memoryview
    part: Part
    release: Callable[[], None]
    """Gives the slab back."""


def lenders(part: Part, folder: str) -> tuple[Borrowed, ...]:
    """The shards that blocks of a part in `folder` lie in, in the order of their numbers."""
    own = [
        Borrowed(
            step=part.step,
            attempt=part.attempt,
            folder=folder,
            name=file.name,
            bytes=file.bytes,
        )
        for file in part.files
    ]
    return (*own, *part.borrowed)


class Borrowing:
    """Collects what one part borrows from a base."""

    def __init__(self, base: Base | None, anchors: tuple[Borrowed, ...] = ()) -> None:
        """`anchors` are named if anything is lost, whether or not blocks lie in them."""
        self._base, self._anchors = base, anchors
        self._files: dict[Borrowed, int] = {}
        self._bases: list[Block] = []
        self._index: dict[int, int] = {}
        """From the base's bases to ours."""
        self._blocks: dict[int, int] = {}
        """From the base's blocks to our bases."""

    def same(self, number: int) -> Block:
        """The base's block at this place, for a part whose bytes there are the same."""
        return self._taken(self._part.blocks[number])

    def base_of(self, number: int, codec: str) -> int | None:
        """The index of the base's block at this place among our bases, if `codec` needs it."""
        if codec not in NEED_BASE:
            return None
        if number not in self._blocks:
            self._bases.append(self._taken(self._part.blocks[number]))
            self._blocks[number] = len(self._bases) - 1
        return self._blocks[number]

    def written(
        self, files: tuple[StoredFile, ...], blocks: list[Block], lossy: Collection[str]
    ) -> Written:
        """What the part says, now that its own files are known, and the rules that lost anything.

        What is lossy is never the only generation: it needs one that is not.
        """
        for anchor in self._anchors if lossy else ():
            self._files.setdefault(anchor, len(self._files))

        def settled(block: Block) -> Block:
            return block if block.file >= 0 else replace(block, file=len(files) - 1 - block.file)

        return Written(
            files=files,
            blocks=tuple(map(settled, blocks)),
            borrowed=tuple(self._files),
            bases=tuple(map(settled, self._bases)),
            lossy=tuple(sorted(lossy)),
        )

    @functools.cached_property
    def _lenders(self) -> tuple[Borrowed, ...]:
        return lenders(self._part, "" if self._base is None else self._base.job.folder)

    @property
    def _part(self) -> Part:
        if self._base is None:
            raise RuntimeError("a block was borrowed from nothing")
        return self._base.part

    def _taken(self, block: Block) -> Block:
        """A block of the base as ours: files that are not ours are counted down from -1."""
        lender = self._lenders[block.file]
        number = self._files.setdefault(lender, len(self._files))
        base = None if block.base is None else self._taken_base(block.base)
        return replace(block, file=-1 - number, base=base)

    def _taken_base(self, index: int) -> int:
        if index not in self._index:
            taken = self._taken(self._part.bases[index])  # its own base first
            self._bases.append(taken)
            self._index[index] = len(self._bases) - 1
        return self._index[index]
