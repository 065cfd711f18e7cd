"""A checked part as bytes that take no time to take to pieces: for a peer, and not for storage.

Who gets them believes who made them, so they pass between processes of one job and of one version
only. Knows the schema. Knows nothing of how bytes pass or of what makes a part right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from torch_ckpt.manifest.digest import ordered_json
from torch_ckpt.manifest.schema import Borrowed, Part, StoredFile
from torch_ckpt.manifest.tables import BlockTable, Heads, TensorTable

_ALIGNED = 8
_NUMBERS = frozenset(["file", "offset", "bytes", "raw_bytes", "base"])
_BLOCKS = ("file", "offset", "bytes", "raw_bytes", "sha256", "xxh3", "codec", "base")


def pack(part: Part) -> bytes:
    """A part as bytes; those of several parts may be joined."""
    blocks, bases = BlockTable.of(part.blocks), BlockTable.of(part.bases)
    tensors = TensorTable.of(part.tensors)
    heads = tensors.heads
    columns = [
        *(getattr(table, name) for table in (blocks, bases) for name in _BLOCKS),
        ordered_json(heads.names),
        *(heads.dtype, heads.dims, heads.shapes),
        *(tensors.counts, tensors.boxes, tensors.starts),
    ]
    views = [memoryview(column).cast("B") if len(column) else b"" for column in columns]
    head = ordered_json(
        {
            "part": [part.step, part.attempt, part.run, part.rank, part.world_size],
            "files": [[one.name, one.bytes] for one in part.files],
            "borrowed": [
                [one.step, one.attempt, one.folder, one.name, one.bytes] for one in part.borrowed
            ],
            "lossy": part.lossy,
            "aliases": dict(part.aliases),
            "tree": part.tree,
            "per_rank": dict(part.per_rank),
            "codecs": [blocks.codecs, bases.codecs],
            "dtypes": heads.dtypes,
            "columns": [len(view) for view in views],
        }
    )
    return b"".join(_padded([len(head).to_bytes(_ALIGNED, "little"), head, *views]))


def _padded(runs: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for run in runs:
        yield run
        yield bytes(-len(run) % _ALIGNED)


class Unpacking:
    """Makes parts of bytes, whose tables look into these bytes; what parts share is kept once."""

    def __init__(self) -> None:
        self._heads: dict[tuple[object, ...], Heads] = {}

    def parts(self, data: memoryview) -> Iterator[Part]:
        """The parts in what `pack` gave for each of them."""
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + _ALIGNED], "little")
            at += _ALIGNED
            head = json.loads(str(data[at : at + size], "ascii"))
            at += size + -size % _ALIGNED
            columns = []
            for size in head["columns"]:
                columns.append(data[at : at + size])
                at += size + -size % _ALIGNED
            yield self._part(head, columns)

    def _part(self, head: dict[str, Any], columns: list[memoryview]) -> Part:
        count = len(_BLOCKS)
        step, attempt, run, rank, world_size = head["part"]
        return Part(
            step=step,
            attempt=attempt,
            run=run,
            rank=rank,
            world_size=world_size,
            files=tuple(StoredFile(name=name, bytes=size) for name, size in head["files"]),
            blocks=_blocks(head["codecs"][0], columns[:count]),
            tensors=self._tensors(head["dtypes"], columns[2 * count :]),
            aliases=head["aliases"],
            tree=head["tree"],
            per_rank=head["per_rank"],
            borrowed=tuple(
                Borrowed(step=step, attempt=attempt, folder=folder, name=name, bytes=size)
                for step, attempt, folder, name, size in head["borrowed"]
            ),
            bases=_blocks(head["codecs"][1], columns[count : 2 * count]),
            lossy=tuple(head["lossy"]),
        )

    def _tensors(self, dtypes: list[str], columns: list[memoryview]) -> TensorTable:
        names, dtype, dims, shapes, counts, boxes, starts = columns
        key = (*dtypes, *map(bytes, (names, dtype, dims, shapes)))
        heads = self._heads.get(key)
        if heads is None:
            heads = self._heads[key] = Heads.made(
                tuple(json.loads(str(names, "ascii"))),
                tuple(dtypes),
                dtype,
                dims,
                shapes.cast("q"),
            )
        return TensorTable.made(heads, counts.cast("q"), boxes.cast("q"), starts.cast("q"))


def _blocks(codecs: list[str], columns: list[memoryview]) -> BlockTable:
    found: dict[str, Any] = {
        name: column.cast("q") if name in _NUMBERS else column
        for name, column in zip(_BLOCKS, columns, strict=True)
    }
    return BlockTable(codecs=tuple(codecs), **found)
