"""Which rank needs which block, a bit each: a thousand ranks and a million blocks fit 128 MB.

Knows ranks and blocks by number. Knows nothing of what is in them or who reads which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from torch_ckpt.sharding.agree import Ranks

_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Needs:
    """A table of ranks and blocks; or of which rank has which."""

    rows: np.ndarray
    """Bits by rank, in whole words."""
    blocks: int

    @classmethod
    def of(cls, table: np.ndarray) -> Needs:
        """The same as a table of booleans says, by rank and block."""
        bits = np.packbits(table, axis=1)
        missing = -bits.shape[1] % _WORD_BYTES
        return cls(np.pad(bits, ((0, 0), (0, missing))), table.shape[1])

    @property
    def ranks(self) -> int:
        """How many ranks."""
        return len(self.rows)

    def any(self) -> np.ndarray:
        """By block, whether any rank needs it."""
        return self._unpacked(np.bitwise_or.reduce(self.rows, axis=0))

    def alone(self) -> Iterator[np.ndarray]:
        """By rank, the blocks that no other rank needs."""
        once, twice = np.zeros_like(self.rows[0]), np.zeros_like(self.rows[0])
        for row in self.rows:
            twice |= once & row
            once |= row
        for row in self.rows:
            yield _set(row & ~twice)

    def most(self) -> int:
        """How many ranks need the block that most of them need."""
        if len(self.rows) == 0 or self.rows.shape[1] == 0:
            return 0
        count = np.zeros(8 * self.rows.shape[1], dtype=np.int32)
        for row in self.rows:
            count[_set(row)] += 1
        return int(count.max())

    def columns(self, blocks: np.ndarray) -> np.ndarray:
        """The table of some blocks as booleans, by rank and position."""
        return (self.rows[:, blocks >> 3] >> (7 - (blocks & 7)).astype(np.uint8) & 1).astype(bool)

    def _unpacked(self, row: np.ndarray) -> np.ndarray:
        return np.unpackbits(row, count=self.blocks).astype(bool)


def _set(row: np.ndarray) -> np.ndarray:
    """The numbers of the bits that are set, of which there may be few."""
    places = np.flatnonzero(row)
    at, bit = np.nonzero(np.unpackbits(row[places].reshape(-1, 1), axis=1))
    return places[at] * 8 + bit


def everyone_needs(mine: np.ndarray, ranks: Ranks) -> Needs:
    """The needs of all ranks, of which each brings its own; all of them call it."""
    packed = Needs.of(mine.reshape(1, -1)).rows[0].view(np.int64)
    rows = ranks.exchange(torch.from_numpy(packed).reshape(-1, 1))
    return Needs(np.stack([row.reshape(-1).numpy().view(np.uint8) for row in rows]), len(mine))
