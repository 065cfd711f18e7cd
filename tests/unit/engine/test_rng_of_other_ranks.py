"""With another number of ranks, each gets a random state of its own, always the same one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from torch_ckpt import RngState


@pytest.fixture(autouse=True)
def own_generators() -> Any:
    """Leave the generators of this process as they were."""
    before = RngState().state_dict()
    yield
    RngState().load_state_dict(before)


def saved_by(seed: int) -> dict[str, Any]:
    """The state of a rank that has drawn from all generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    _ = random.gauss(0, 1), np.random.randn(3), torch.randn(3)
    return RngState().state_dict()


def draws(state: dict[str, Any]) -> tuple[Any, ...]:
    """What the three generators of a process in this state give next."""
    RngState().load_state_dict(state)
    return random.random(), *np.random.rand(2), *torch.rand(2).tolist()


SAVED = [saved_by(1), saved_by(2)]


def test_the_derived_state_is_the_same_each_time_whatever_the_process_did_before() -> None:
    first = draws(RngState().reshard_state_dict(SAVED, 0, 3))
    _ = torch.rand(5), np.random.rand(5), random.random()
    assert draws(RngState().reshard_state_dict(SAVED, 0, 3)) == first


def test_every_rank_and_every_number_of_ranks_has_another_one() -> None:
    derived = [
        draws(RngState().reshard_state_dict(SAVED, rank, size))
        for size in (1, 3, 4)
        for rank in range(size)
    ]
    own = [draws(state) for state in SAVED]
    columns = list(zip(*derived, *own, strict=True))
    assert all(len(set(column)) == len(column) for column in columns)


def test_it_depends_on_the_state_of_every_saved_rank_and_their_order() -> None:
    first = draws(RngState().reshard_state_dict(SAVED, 0, 3))
    other = saved_by(3)
    for states in ([SAVED[0], other], [other, SAVED[1]], SAVED[::-1], SAVED[:1], [*SAVED, other]):
        assert draws(RngState().reshard_state_dict(states, 0, 3)) != first


def test_deriving_draws_nothing() -> None:
    before = RngState().state_dict()
    expected = draws(before)
    RngState().load_state_dict(before)
    RngState().reshard_state_dict(SAVED, 1, 3)
    assert draws(RngState().state_dict()) == expected
