"""Blocks that several ranks need are read by one of them, verified, and passed to the others.

Which rank reads which block follows from what all ranks need, on every rank alike. Peers on one
host look into the reader's memory; others get messages. Knows ranks and blocks by number. Knows
nothing of files or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from torch_ckpt.errors import CkptError, StorageError
from torch_ckpt.sharding.agree import Ranks
from torch_ckpt.sharding.window import Forget, Windows

T = TypeVar("T")

AT_ONCE = 16
"""Blocks that a rank holds on their way to others, and as many that it reads ahead."""


class Blocks(Protocol):
    """What can be done with a block, by its number; from any thread."""

    def read(self, block: int, into: memoryview | None) -> torch.Tensor:
        """Its raw bytes, verified; in `into` if that is given."""
        ...

    def take(self, block: int, raw: torch.Tensor, forget: Forget | None = None) -> None:
        """Take what this rank needs of bytes that have been verified.

        They are a peer's if there is `forget`, to be called now and then on the way.
        """
        ...

    def take_received(self, block: int, raw: torch.Tensor) -> None:
        """The same of bytes that a peer has verified and sent: check that they arrived well."""
        ...


class PeerFailed(CkptError, RuntimeError):
    """Another rank could not read; it has an error of its own that says why."""


@dataclass(frozen=True)
class Split:
    """Who reads what, when."""

    alone: list[int]
    """Blocks that nobody else needs."""
    rounds: list[list[int]]
    """Blocks that several ranks need, in the order in which all of them pass them on."""
    reader: np.ndarray
    """A rank by block; -1 for blocks that nobody needs."""
    needs: np.ndarray
    """By rank and block."""


def split(
    needs: np.ndarray,
    sizes: np.ndarray,
    rank: int,
    at_once: int = AT_ONCE,
    holds: np.ndarray | None = None,
) -> Split:
    """Share the reading out so that every rank reads about as many bytes.

    Args:
        needs: Whether a rank needs a block, by rank and block.
        sizes: Bytes of each block.
        rank: For whom `alone` is.
        at_once: The most blocks that a rank has in its hands in one round.
        holds: Whether a rank can read a block, by rank and block; None if each can read all.

    Raises:
        StorageError: nobody can read a block that somebody needs.
    """
    count = needs.sum(axis=0)
    able = needs if holds is None else _able(needs, holds)
    reader = np.where(count > 0, able.argmax(axis=0), -1)
    # What one rank alone needs, and can read itself.
    single = (count == 1) & (needs & able).any(axis=0)
    loads = [int(sizes[(reader == one) & single].sum()) for one in range(len(needs))]
    shared = np.flatnonzero((count > 0) & ~single)
    turn: dict[int, int] = {}
    taken = [0] * len(needs)
    for block in shared.tolist():
        one = min(np.flatnonzero(able[:, block]).tolist(), key=loads.__getitem__)
        reader[block] = one
        loads[one] += int(sizes[block])
        turn[block] = taken[one]
        taken[one] += 1
    # All readers at once rather than one after the other.
    order = sorted(turn, key=lambda block: (turn[block], block))
    alone = np.flatnonzero((reader == rank) & single).tolist()
    in_hand = needs.copy()
    in_hand[reader[order], order] = True
    return Split(alone, _rounds(order, in_hand, at_once), reader, needs)


def _able(needs: np.ndarray, holds: np.ndarray) -> np.ndarray:
    """Who may read a block: a rank that needs it and holds it, or else one that holds it."""
    both = needs & holds
    able = np.where(both.any(axis=0), both, holds)
    lacking = np.flatnonzero(needs.any(axis=0) & ~able.any(axis=0))
    if len(lacking):
        raise StorageError(f"no rank has block {int(lacking[0])} of what they load together")
    return able


def _rounds(order: Sequence[int], needs: np.ndarray, at_once: int) -> list[list[int]]:
    """Cut so that no rank has more than a few blocks in its hands."""
    rounds: list[list[int]] = []
    load = np.zeros(len(needs), dtype=np.int64)
    for block in order:
        load = load + needs[:, block]
        if not rounds or load.max() > at_once:
            rounds.append([])
            load = needs[:, block].astype(np.int64)
        rounds[-1].append(block)
    return rounds


def everyone_needs(mine: np.ndarray, ranks: Ranks) -> np.ndarray:
    """The needs of all ranks; all of them call it."""
    packed = torch.from_numpy(np.packbits(mine))
    rows = ranks.exchange(packed.to(torch.int64).reshape(-1, 1))
    table = np.stack([row.reshape(-1).to(torch.uint8).numpy() for row in rows])
    return np.unpackbits(table, axis=1, count=len(mine)).astype(bool)


def pass_on(
    plan: Split,
    sizes: np.ndarray,
    ranks: Ranks,
    pool: Executor,
    blocks: Blocks,
    *,
    slow: bool = True,
) -> None:
    """Read and exchange the blocks that several ranks need; all ranks call it.

    Args:
        sizes: Raw bytes of each block.
        slow: Whether reading takes long beside looking into a peer's memory. If so, blocks are
            read ahead while others are looked at, in twice the memory.

    Raises:
        PeerFailed: a rank could not read a block; all of them stop after the same round.
    """
    if not plan.rounds:
        return
    counts = [np.bincount(plan.reader[b], minlength=len(plan.needs)) for b in plan.rounds]
    halves = np.max(counts, axis=0).tolist()
    most = int(max(sizes[b].max() for b in plan.rounds))
    windows = Windows(ranks, 2 * halves[ranks.rank], most)
    try:
        # Two halves: one is read into while peers look into the other. Of one that is not used,
        # no page is ever touched.
        ahead = slow or _by_messages(plan, windows.reached_by)
        _Passing(plan, sizes, ranks, pool, blocks, windows, halves, ahead).run()
    finally:
        windows.close()


def _by_messages(plan: Split, reached_by: np.ndarray) -> bool:
    """Whether any block has to go to a rank that cannot look at it; all ranks see the same."""
    passed = np.concatenate(plan.rounds)
    lookers = reached_by[plan.reader[passed]].T | (
        np.arange(len(plan.needs))[:, None] == plan.reader[passed]
    )
    return bool((plan.needs[:, passed] & ~lookers).any())


@dataclass
class _Passing:
    plan: Split
    sizes: np.ndarray
    ranks: Ranks
    pool: Executor
    blocks: Blocks
    windows: Windows
    halves: Sequence[int]
    """By rank, the slots of half a window: as many as the rank reads in its fullest round."""
    ahead: bool
    """Whether the next round is read while this one is passed on."""

    def run(self) -> None:
        failure: BaseException | None = None
        reads = self._begin(0)
        for number in range(len(self.plan.rounds)):
            held, failed = _results(reads)
            self._check(failure or failed)
            if self.ahead:  # everyone has done with the round before, so that half is free
                reads = self._begin(number + 1)
            try:
                failure = self._give_and_take(number, held)
            except BaseException:
                for read in reads.values():
                    read.cancel()
                raise
            del held  # where there is no window, they are memory of their own
            if not self.ahead:
                self._check(failure)  # everyone has done with this round
                reads = self._begin(number + 1)
        self._check(failure)

    def _check(self, failure: BaseException | None) -> None:
        """Leave together: a rank that left alone would keep the others waiting."""
        if self.ranks.any(failure is not None):
            raise failure or PeerFailed("another rank could not read what this one needs")

    def _begin(self, number: int) -> dict[int, Future[torch.Tensor]]:
        """Start to read this rank's blocks of a round."""
        if number >= len(self.plan.rounds):
            return {}
        mine = [b for b in self.plan.rounds[number] if self.plan.reader[b] == self.ranks.rank]
        first = self._half(number) * self.halves[self.ranks.rank]
        return {
            block: self.pool.submit(self.blocks.read, block, self.windows.slot(first + place))
            for place, block in enumerate(mine)
        }

    def _give_and_take(self, number: int, held: dict[int, torch.Tensor]) -> BaseException | None:
        """Pass on the blocks of a round; why this rank could not take one, if so."""
        plan, ranks, pool = self.plan, self.ranks, self.pool
        reached_by = self.windows.reached_by
        slots: dict[int, int] = {}
        received: dict[int, torch.Tensor] = {}
        done: list[Future[None]] = []
        with ranks.transfer() as transfer:
            for block in plan.rounds[number]:
                reader = int(plan.reader[block])
                slot = slots[reader] = slots.get(reader, -1) + 1
                if reader == ranks.rank:
                    done.append(pool.submit(self.blocks.take, block, held[block]))
                    for other in np.flatnonzero(plan.needs[:, block]).tolist():
                        if other != reader and not reached_by[reader, other]:
                            transfer.send(held[block], other)
                elif plan.needs[ranks.rank, block]:
                    if reached_by[reader, ranks.rank]:
                        done.append(pool.submit(self._look, block, reader, number, slot))
                    else:
                        size = int(self.sizes[block])
                        received[block] = torch.empty(size, dtype=torch.uint8)
                        transfer.receive(received[block], reader)
        done += [pool.submit(self.blocks.take_received, b, raw) for b, raw in received.items()]
        return _results(dict(enumerate(done)))[1]

    def _half(self, number: int) -> int:
        return number % 2 if self.ahead else 0

    def _look(self, block: int, reader: int, number: int, slot: int) -> None:
        place = self._half(number) * self.halves[reader] + slot
        with self.windows.look(reader, place, int(self.sizes[block])) as (raw, forget):
            self.blocks.take(block, raw, forget)


def _results(futures: dict[int, Future[T]]) -> tuple[dict[int, T], BaseException | None]:
    """What has come of all of them, and the first failure."""
    results: dict[int, T] = {}
    failure: BaseException | None = None
    for number, future in futures.items():
        try:
            results[number] = future.result()
        except Exception as error:  # the other ranks must hear of it, whatever it is
            failure = failure or error
    return results, failure
