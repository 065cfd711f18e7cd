"""Every box is written once, and no rank writes much more than another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_ckpt.sharding.owners import Held, assign, claims, whole
from torch_ckpt.staging.sharded import Box


def held(rows: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]], most: int) -> Held:
    """Rows of tensor, rank, offsets and shape."""
    return Held(
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[1] for row in rows], dtype=np.int64),
        np.array(
            [[*o, *[0] * (most - len(o)), *s, *[1] * (most - len(s))] for _, _, o, s in rows],
            dtype=np.int64,
        ),
    )


def test_equal_boxes_of_several_ranks_are_one_claim_of_all_of_them() -> None:
    rows = [(0, rank, (4 * (rank % 2), 0), (4, 3)) for rank in range(4)]
    found = claims(held(rows, 2), [(8, 3)], [4], rank=1, world_size=4)
    assert (found.alone, found.loads) == ([], [0] * 4)
    assert [(claim.box.offsets, claim.ranks, claim.bytes) for claim in found.shared] == [
        ((0, 0), (0, 2), 48),
        ((4, 0), (1, 3), 48),
    ]


def test_empty_boxes_are_nobodys_unless_the_tensor_has_no_element_at_all() -> None:
    rows = [(0, 0, (0,), (2,)), (0, 1, (2,), (0,)), (1, 0, (0,), (0,)), (1, 1, (0,), (0,))]
    found = claims(held(rows, 1), [(2,), (0,)], [4, 4], rank=0, world_size=2)
    assert [(claim.tensor, claim.ranks) for claim in found.alone] == [(0, (0,))]
    assert [(claim.tensor, claim.ranks) for claim in found.shared] == [(1, (0, 1))]
    assert (found.loads, found.elements, found.tiled) == ([8, 0], [2, 0], [True, True])


def test_what_other_ranks_alone_hold_is_known_by_its_bytes_only() -> None:
    rows = [(0, rank, (2 * rank,), (2,)) for rank in range(5)]
    found = claims(held(rows, 1), [(10,)], [4], rank=3, world_size=5)
    assert [claim.box for claim in found.alone] == [Box((6,), (2,))]
    assert (found.shared, found.loads, found.elements) == ([], [8] * 5, [10])


def test_boxes_that_overlap_and_leave_as_much_out_are_not_a_tensor() -> None:
    rows = [(0, rank, (rank, 0), (1, 3)) for rank in range(4)]
    rows += [(1, rank, (min(rank, 2), 0), (1 + rank // 2, 3)) for rank in range(3)]
    rows += [(1, 3, (1, 0), (1, 3))]
    found = claims(held(rows, 2), [(4, 3), (5, 3)], [4, 4], rank=0, world_size=4)
    assert found.elements == [12, 12]
    assert found.tiled == [True, False]
    rows += [(1, 4, (4, 0), (1, 3))]
    found = claims(held(rows, 2), [(4, 3), (5, 3)], [4, 4], rank=0, world_size=5)
    assert (found.elements, found.tiled) == ([12, 15], [True, True])
    rows[-1] = (1, 4, (3, 0), (1, 3))
    found = claims(held(rows, 2), [(4, 3), (5, 3)], [4, 4], rank=0, world_size=5)
    assert (found.elements, found.tiled) == ([12, 15], [True, False])


def test_boxes_without_elements_are_written_once_however_they_lie() -> None:
    rows = [(0, rank, (rank, 0), (1, 0)) for rank in range(3)]
    alone = [claims(held(rows, 2), [(3, 0)], [4], rank=r, world_size=3).alone for r in range(3)]
    assert [len(claimed) for claimed in alone] == [1, 0, 0]


def test_dimensions_that_a_tensor_does_not_have_are_left_out() -> None:
    rows = [(0, 0, (), ()), (1, 0, (1, 2), (3, 4))]
    found = claims(held(rows, 2), [(), (4, 6)], [8, 4], rank=0, world_size=1)
    assert [claim.box for claim in found.alone] == [Box((), ()), Box((1, 2), (3, 4))]


@given(
    st.lists(st.integers(1, 40_000_000), min_size=40, max_size=80),
    st.sampled_from([2, 3, 4, 8]),
)
def test_replicated_tensors_are_balanced_on_bytes(sizes: list[int], world_size: int) -> None:
    owned = assign([whole(i, (n,), 4, world_size) for i, n in enumerate(sizes)], [0] * world_size)
    loads = [0] * world_size
    for rank, claim in owned:
        loads[rank] += claim.bytes
    assert sum(loads) == 4 * sum(sizes)
    mean = sum(loads) / world_size
    assert max(loads) <= max(1.1 * mean, mean + (1 << 20))


def test_one_giant_tensor_is_written_by_all_its_ranks() -> None:
    owned = assign([whole(0, (1000, 1 << 18), 4, 4), whole(1, (10,), 4, 4)], [0] * 4)
    pieces = sorted((c.box for _, c in owned if c.tensor == 0), key=lambda box: box.offsets)
    assert {rank for rank, c in owned if c.tensor == 0} == {0, 1, 2, 3}
    edge = 0
    for box in pieces:
        assert box.offsets == (edge, 0)
        edge += box.shape[0]
    assert edge == 1000


def test_small_tensors_are_the_first_ranks_while_that_is_fair() -> None:
    few = [whole(i, (100,), 4, 2) for i in range(4)] + [whole(4, (1 << 22,), 4, 2)]
    assert {rank for rank, claim in assign(few, [0, 0]) if claim.tensor < 4} == {0}
    many = [whole(i, (200_000,), 4, 2) for i in range(100)]
    ranks = [rank for rank, _ in assign(many, [0, 0])]
    assert ranks.count(0) == ranks.count(1)


def test_tensors_that_are_the_first_ranks_stay_so_whatever_its_load() -> None:
    many = [whole(i, (200_000,), 4, 2) for i in range(10)]
    owned = assign(many, [0, 0], of_first=range(6))
    assert {rank for rank, claim in owned if claim.tensor < 6} == {0}
    assert {rank for rank, claim in owned if claim.tensor >= 6} == {1}


def test_what_one_rank_alone_holds_is_its_own_and_counts_as_its_load() -> None:
    shared = [whole(i, (1 << 21,), 4, 2) for i in range(1, 5)]
    owned = {claim.tensor: rank for rank, claim in assign(shared, [1 << 26, 0])}
    assert {owned[i] for i in range(1, 5)} == {1}


@pytest.mark.parametrize("world_size", [1, 5])
def test_every_rank_comes_to_the_same_owners(world_size: int) -> None:
    made = [whole(i, (3 + i, 1 << 18), 4, world_size) for i in range(20)]
    loads = [0] * world_size
    assert assign(made, loads) == assign(list(made), loads)
    assert loads == [0] * world_size
    assert world_size > 1 or [claim for _, claim in assign(made, loads)] == made
