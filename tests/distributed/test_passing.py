"""Blocks that several ranks need arrive on all of them, through shared memory or as messages."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.ranks import run_ranks
from torch_ckpt.sharding.agree import Ranks
from torch_ckpt.sharding.broadcast import PeerFailed, pass_on, split
from torch_ckpt.sharding.needs import Needs
from torch_ckpt.sharding.window import Forget

SIZES = np.array([5000, 1, 4096, 70_000, 333, 8192, 12, 9000, 40_000, 77])


def content(block: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(block)
    return torch.randint(256, (int(SIZES[block]),), dtype=torch.uint8, generator=generator)


class Made:
    """Blocks that exist without files."""

    def __init__(self, *, unreadable: int = -1, untakeable: int = -1) -> None:
        self.taken: dict[int, torch.Tensor] = {}
        self.received: list[int] = []
        self._unreadable, self._untakeable = unreadable, untakeable

    def read(self, block: int, into: memoryview | None) -> torch.Tensor:
        if block == self._unreadable:
            raise OSError("not readable")
        raw = content(block)
        if into is None:
            return raw
        into[: len(raw)] = raw.numpy().data
        return torch.frombuffer(into, dtype=torch.uint8, count=len(raw))

    def take(self, block: int, raw: torch.Tensor, forget: Forget | None = None) -> None:
        if block == self._untakeable:
            raise MemoryError("no room")
        if forget is not None:
            seen = raw.clone()
            forget()  # what comes again is the same
            assert torch.equal(raw, seen)
        self.taken[block] = raw.clone()

    def take_received(self, block: int, raw: torch.Tensor) -> None:
        self.received.append(block)
        self.take(block, raw)


def needs(world_size: int) -> np.ndarray:
    """All ranks need most blocks; the first rank needs none of the last ones."""
    table = np.ones((world_size, len(SIZES)), dtype=bool)
    table[0, -3:] = False
    return table


def passed(
    rank: int, without: tuple[int, ...], kinds: dict[str, int], at_once: int, slow: bool
) -> Any:
    if rank in without:
        del os.memfd_create
    before = set(os.listdir("/proc/self/fd"))
    ranks = Ranks(None, timeout_s=30)
    plan = split(Needs.of(needs(ranks.world_size)), SIZES, rank, at_once)
    made = Made(**(kinds if rank == 1 else {}))
    try:
        with ThreadPoolExecutor(2) as pool:
            pass_on(plan, SIZES, ranks, pool, made, slow=slow)
    finally:
        ranks.close()
    left = [f for f in set(os.listdir("/proc/self/fd")) - before if "memfd" in _target(f)]
    shared = {block for round_ in plan.rounds for block in round_}
    expected = {block for block in shared if needs(ranks.world_size)[rank, block]}
    right = all(torch.equal(made.taken[block], content(block)) for block in expected)
    sent = sorted(b for b in expected if plan.reader[b] in without and plan.reader[b] != rank)
    return {
        "right": right and made.taken.keys() == expected,
        "as messages": sorted(made.received) == sent,
        "left": left,
    }


def _target(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


@pytest.mark.parametrize(("at_once", "slow"), [(2, False), (16, False), (4, True)])
@pytest.mark.parametrize("without", [(), (1,), (0, 1, 2)], ids=["shared", "mixed", "messages"])
def test_every_rank_gets_what_it_needs(
    tmp_path: Path, without: tuple[int, ...], at_once: int, slow: bool
) -> None:
    for found in run_ranks(tmp_path / "ranks", passed, 3, without, {}, at_once, slow):
        assert found == {"right": True, "as messages": True, "left": []}


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("kind", ["unreadable", "untakeable"])
def test_all_ranks_leave_when_one_cannot_read_or_take(
    tmp_path: Path, kind: str, slow: bool
) -> None:
    plan = split(Needs.of(needs(3)), SIZES, 1, 4)
    block = next(b for round_ in plan.rounds for b in round_ if plan.reader[b] == 1)
    found = run_ranks(tmp_path / "ranks", passed, 3, (), {kind: block}, 4, slow, timeout_s=60)
    assert isinstance(found[1], OSError if kind == "unreadable" else MemoryError), found
    assert isinstance(found[0], PeerFailed), found
    assert isinstance(found[2], PeerFailed), found
