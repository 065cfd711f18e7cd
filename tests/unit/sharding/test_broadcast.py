"""Who reads which block: each once, evenly, and never more in hand than a few."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from torch_ckpt.errors import StorageError
from torch_ckpt.sharding.broadcast import split
from torch_ckpt.sharding.needs import Needs

MB = 1 << 20


def test_what_all_ranks_need_is_read_once_and_evenly() -> None:
    needs = np.ones((4, 100), dtype=bool)
    sizes = np.full(100, 8 * MB)
    plan = split(Needs.of(needs), sizes, 0)
    loads = [int(sizes[plan.reader == rank].sum()) for rank in range(4)]
    assert plan.alone == []
    assert sum(loads) == sizes.sum()
    assert max(loads) <= 1.1 * np.mean(loads)


def test_replicas_of_shards_share_the_reading_of_their_shard() -> None:
    needs = np.zeros((8, 80), dtype=bool)
    for rank in range(8):
        needs[rank, (rank % 2) * 40 : (rank % 2) * 40 + 40] = True
    plan = split(Needs.of(needs), np.full(80, 8 * MB), 3)
    assert np.bincount(plan.reader).tolist() == [10] * 8


def test_ranks_that_read_their_own_get_less_of_what_is_shared() -> None:
    needs = np.ones((2, 30), dtype=bool)
    needs[1, :10] = False
    plan = split(Needs.of(needs), np.full(30, MB), 0)
    assert plan.alone == list(range(10))
    assert (plan.reader == 0).sum() == (plan.reader == 1).sum() == 15


TABLES = arrays(bool, st.tuples(st.integers(2, 5), st.integers(0, 90)))


@given(TABLES)
def test_a_table_of_bits_says_what_one_of_booleans_says(table: np.ndarray) -> None:
    needs, count = Needs.of(table), table.sum(axis=0)
    assert needs.any().tolist() == table.any(axis=0).tolist()
    assert needs.most() == count.max(initial=0)
    alone = [np.flatnonzero(row & (count == 1)).tolist() for row in table]
    assert [blocks.tolist() for blocks in needs.alone()] == alone
    some = np.arange(needs.blocks)[::-3]
    assert (needs.columns(some) == table[:, some]).all()


@given(TABLES, st.data())
def test_a_block_is_read_by_a_rank_that_holds_it(needs: np.ndarray, data: st.DataObject) -> None:
    holds = data.draw(arrays(bool, needs.shape))
    sizes = np.full(needs.shape[1], MB)
    wanted = np.flatnonzero(needs.any(axis=0))
    if not holds[:, wanted].any(axis=0).all():
        with pytest.raises(StorageError, match="no rank has block"):
            split(Needs.of(needs), sizes, 0, holds=Needs.of(holds))
        return
    plans = [split(Needs.of(needs), sizes, r, holds=Needs.of(holds)) for r in range(len(needs))]
    for block in wanted.tolist():
        reader = plans[0].reader[block]
        assert holds[reader, block]
        assert needs[reader, block] or not (needs & holds)[:, block].any()
        alone = [rank for rank, plan in enumerate(plans) if block in plan.alone]
        own = needs[:, block].sum() == 1 and needs[reader, block]
        assert alone == ([reader] if own else [])


@given(arrays(bool, st.tuples(st.integers(2, 5), st.integers(0, 60))))
def test_every_needed_block_has_one_reader_among_those_that_need_it(needs: np.ndarray) -> None:
    sizes = np.full(needs.shape[1], MB)
    plans = [split(Needs.of(needs), sizes, rank) for rank in range(len(needs))]
    shared = [block for blocks in plans[0].rounds for block in blocks]
    alone = [block for plan in plans for block in plan.alone]
    assert sorted(shared + alone) == np.flatnonzero(needs.any(axis=0)).tolist()
    for plan in plans:
        assert plan.rounds == plans[0].rounds
        assert all(needs[plan.reader[b], b] for b in shared + alone)
    for blocks in plans[0].rounds:
        assert needs[:, blocks].sum(axis=1).max() <= 16
