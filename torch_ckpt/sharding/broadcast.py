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
from torch_ckpt.sharding.needs import Needs
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
    column: dict[int, int]
    """Where in `needs` a block of a round is."""
    needs: np.ndarray
    """By rank and column."""


def split(
    needs: Needs,
    sizes: np.ndarray,
    rank: int,
    at_once: int = AT_ONCE,
    holds: Needs | None = None,
) -> Split:
    """Share the reading out so that every rank reads about as many bytes.

    Args:
        needs: Whether a rank needs a block.
        sizes: Bytes of each block.
        rank: For whom `alone` is.
        at_once: The most blocks that a rank has in its hands in one round.
        holds: Whether a rank can read a block; None if each can read all.

    Raises:
        StorageError: nobody can read a block that somebody needs.
    """
    reader = np.full(needs.blocks, -1)
    loads: list[int] = []
    alone: list[int] = []
    for one, single in enumerate(needs.alone()):
        if holds is not None:  # what it alone needs, and can read itself
            single = single[holds.columns(single)[one]]
        reader[single] = one
        loads.append(int(sizes[single].sum()))
        if one == rank:
            alone = single.tolist()
    shared = np.flatnonzero(needs.any() & (reader < 0))
    wanted = needs.columns(shared)
    able = wanted if holds is None else _able(wanted, holds.columns(shared), shared)
    turn: list[tuple[int, int, int]] = []
    taken = [0] * needs.ranks
    for column, block in enumerate(shared.tolist()):
        one = min(np.flatnonzero(able[:, column]).tolist(), key=loads.__getitem__)
        reader[block] = one
        loads[one] += int(sizes[block])
        turn.append((taken[one], block, column))
        taken[one] += 1
    # All readers at once rather than one after the other.
    order = [(block, column) for _, block, column in sorted(turn)]
    in_hand = wanted.copy()
    in_hand[reader[shared], np.arange(len(shared))] = True
    column = dict(order)
    return Split(alone, _rounds(order, in_hand, at_once), reader, column, wanted)


def _able(wanted: np.ndarray, held: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Who may read a block: a rank that needs it and holds it, or else one that holds it."""
    both = wanted & held
    able = np.where(both.any(axis=0), both, held)
    lacking = np.flatnonzero(~able.any(axis=0))
    if len(lacking):
        raise StorageError(
            f"no rank has block {int(blocks[lacking[0]])} of what they load together"
        )
    return able


def _rounds(order: Sequence[tuple[int, int]], needs: np.ndarray, at_once: int) -> list[list[int]]:
    """Blocks with their columns, cut so that no rank has more than a few in its hands."""
    rounds: list[list[int]] = []
    load = np.zeros(len(needs), dtype=np.int64)
    for block, column in order:
        load = load + needs[:, column]
        if not rounds or load.max() > at_once:
            rounds.append([])
            load = needs[:, column].astype(np.int64)
        rounds[-1].append(block)
    return rounds


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
    columns = [plan.column[block] for block in passed.tolist()]
    return bool((plan.needs[:, columns] & ~lookers).any())


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
                reader, needs = int(plan.reader[block]), plan.needs[:, plan.column[block]]
                slot = slots[reader] = slots.get(reader, -1) + 1
                if reader == ranks.rank:
                    done.append(pool.submit(self.blocks.take, block, held[block]))
                    for other in np.flatnonzero(needs).tolist():
                        if other != reader and not reached_by[reader, other]:
                            transfer.send(held[block], other)
                elif needs[ranks.rank]:
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
