"""Who reads which block: each once, evenly, and never more in hand than a few."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from torch_ckpt.sharding.broadcast import split

MB = 1 << 20


def test_what_all_ranks_need_is_read_once_and_evenly() -> None:
    needs = np.ones((4, 100), dtype=bool)
    sizes = np.full(100, 8 * MB)
    plan = split(needs, sizes, 0)
    loads = [int(sizes[plan.reader == rank].sum()) for rank in range(4)]
    assert plan.alone == []
    assert sum(loads) == sizes.sum()
    assert max(loads) <= 1.1 * np.mean(loads)


def test_replicas_of_shards_share_the_reading_of_their_shard() -> None:
    needs = np.zeros((8, 80), dtype=bool)
    for rank in range(8):
        needs[rank, (rank % 2) * 40 : (rank % 2) * 40 + 40] = True
    plan = split(needs, np.full(80, 8 * MB), 3)
    assert np.bincount(plan.reader).tolist() == [10] * 8


def test_ranks_that_read_their_own_get_less_of_what_is_shared() -> None:
    needs = np.ones((2, 30), dtype=bool)
    needs[1, :10] = False
    plan = split(needs, np.full(30, MB), 0)
    assert plan.alone == list(range(10))
    assert (plan.reader == 0).sum() == (plan.reader == 1).sum() == 15


@given(arrays(bool, st.tuples(st.integers(2, 5), st.integers(0, 60))))
def test_every_needed_block_has_one_reader_among_those_that_need_it(needs: np.ndarray) -> None:
    sizes = np.full(needs.shape[1], MB)
    plans = [split(needs, sizes, rank) for rank in range(len(needs))]
    shared = [block for blocks in plans[0].rounds for block in blocks]
    alone = [block for plan in plans for block in plan.alone]
    assert sorted(shared + alone) == np.flatnonzero(needs.any(axis=0)).tolist()
    for plan in plans:
        assert plan.rounds == plans[0].rounds
        assert all(needs[plan.reader[b], b] for b in shared + alone)
    for blocks in plans[0].rounds:
        assert needs[:, blocks].sum(axis=1).max() <= 16
