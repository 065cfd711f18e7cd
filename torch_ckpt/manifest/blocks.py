"""How a rank's tensors become a raw space, blocks, and the header of a plain safetensors shard.

Pure functions on sizes. Knows nothing of memory, files or ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_ckpt.manifest.dtypes import DTYPES
from torch_ckpt.manifest.entries import BLOCK_BYTES

PAGE_BYTES = 4096
"""Shard images keep their data at multiples of this, as direct I/O wants."""

_SMALL_BYTES = 1 << 20
"""Tensors below this share blocks with their neighbours."""


def _alike(name: str) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of the raw space: one block before it is encoded."""

    start: int
    bytes: int


class Piece(NamedTuple):
    """One contiguous piece of a tensor that this rank writes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of this piece."""
    offsets: tuple[int, ...]
    """Of its first element in the whole tensor."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def bytes(self) -> int:
        """Raw bytes of this piece."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Placed(NamedTuple):
    """A piece and where it lies in the raw space."""

    piece: Piece
    start: int


def has_own_blocks(piece: Piece) -> bool:
    """Whether a piece begins a block of its own and shares none with its neighbours."""
    return piece.bytes >= _SMALL_BYTES


def place(pieces: Iterable[Piece], group: Callable[[str], int] = _alike) -> list[Placed]:
    """Pack pieces without gaps, widest elements first, so that each is aligned to its elements.

    Small ones whose names are of one group come one after another.
    """

    def rank(sized: tuple[int, int, Piece]) -> tuple[int, str, bool, int]:
        size, item, piece = sized
        small = size < _SMALL_BYTES
        return -item, piece.dtype, small, group(piece.name) if small else 0

    sized = [(piece.bytes, DTYPES[piece.dtype].itemsize, piece) for piece in pieces]
    placed, start = [], 0
    for size, _, piece in sorted(sized, key=rank):
        placed.append(Placed(piece, start))
        start += size
    return placed


def cut(
    placed: Sequence[Placed], limit: int = BLOCK_BYTES, group: Callable[[str], int] = _alike
) -> list[Extent]:
    """Partition the raw space into extents of one dtype and at most `limit` bytes each.

    A large tensor begins an extent of its own; small ones of one group share one.
    """
    extents: list[Extent] = []
    run_start = run_end = 0
    run_kind = ("", 0)
    for item in placed:
        size = item.piece.bytes
        if size == 0:
            continue
        kind = (item.piece.dtype, group(item.piece.name))
        joins = size < _SMALL_BYTES and kind == run_kind and run_end - run_start + size <= limit
        if not joins:
            if run_end > run_start:
                extents.append(Extent(run_start, run_end - run_start))
            run_start = item.start
        run_end, run_kind = item.start + size, kind
        if size >= _SMALL_BYTES:
            while run_end - run_start > limit:
                extents.append(Extent(run_start, limit))
                run_start += limit
            extents.append(Extent(run_start, run_end - run_start))
            run_start, run_kind = run_end, ("", 0)
    if run_end > run_start:
        extents.append(Extent(run_start, run_end - run_start))
    return extents


def safetensors_header(placed: Sequence[Placed]) -> bytes:
    """Length prefix and JSON of a safetensors file, padded to whole pages.

    A piece of a larger tensor is named `name@offsets`; a dtype that safetensors lacks is
    described as bytes. Source: the safetensors format description (header of an 8-byte
    little-endian length and JSON that may end in spaces, then a buffer without holes).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for item in placed:
        piece, kind = item.piece, DTYPES[item.piece.dtype]
        name = piece.name
        if piece.shape != piece.whole:
            name = f"{name}@{','.join(map(str, piece.offsets))}"
        shape = list(piece.shape)
        if kind.safetensors is None:
            shape = [*shape[:-1], shape[-1] * kind.itemsize] if shape else [kind.itemsize]
        header[name] = {
            "dtype": kind.safetensors or "U8",
            "shape": shape,
            "data_offsets": [item.start, item.start + piece.bytes],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    total = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8, b" ")
