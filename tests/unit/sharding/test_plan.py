"""A plan is kept while a state keeps its shape, and what it depends on changes its fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt import Checkpointer, load_generation
from torch_ckpt.sharding.plan import Planner
from torch_ckpt.staging.tree import PerRank, flatten


def state() -> dict[str, Any]:
    return {"model": {"a": torch.zeros(4, 6), "b": [torch.ones(3), 7]}, "step": 1}


def dtype(changed: dict[str, Any]) -> None:
    changed["model"]["a"] = changed["model"]["a"].half()


def shape(changed: dict[str, Any]) -> None:
    changed["model"]["a"] = changed["model"]["a"].reshape(6, 4)


def one_key_more(changed: dict[str, Any]) -> None:
    changed["model"]["c"] = torch.zeros(1)


def one_key_less(changed: dict[str, Any]) -> None:
    del changed["model"]["a"]


def another_name(changed: dict[str, Any]) -> None:
    changed["model"]["other"] = changed["model"].pop("a")


def nesting(changed: dict[str, Any]) -> None:
    changed["model"]["b"] = [[changed["model"]["b"][0]], 7]


def a_key_that_looks_like_nesting(changed: dict[str, Any]) -> None:
    changed["model.a"] = changed["model"].pop("a")


def per_rank(changed: dict[str, Any]) -> None:
    changed["model"]["a"] = PerRank(changed["model"]["a"])


Change = Callable[[dict[str, Any]], None]
CHANGES = [dtype, shape, one_key_more, one_key_less, another_name, nesting, per_rank]


def refused(rows: torch.Tensor) -> list[torch.Tensor]:
    raise AssertionError("nothing here is shared out, so there is nothing to exchange")


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_state_is_noticed_and_planned_anew(change: Change) -> None:
    planner = Planner(0, 2)
    before = planner.survey(flatten(state())).fingerprint
    planner.plan(flatten(state()), refused)
    assert not planner.stale
    changed = state()
    change(changed)
    flat = flatten(changed)
    assert planner.survey(flat).fingerprint != before
    assert planner.stale
    assert planner.plan(flat, refused).raw_bytes == Planner(0, 2)._fresh(flat, refused).raw_bytes
    assert planner.survey(flatten(state())).fingerprint == before


def test_values_and_objects_that_change_keep_the_plan() -> None:
    planner = Planner(0, 2)
    planner.survey(flatten(state()))
    plan = planner.plan(flatten(state()), refused)
    changed = {**state(), "step": 2, "note": "no tensor"}
    changed["model"]["a"].add_(1)
    planner.survey(flatten(changed))
    assert planner.plan(flatten(changed), refused) is plan


def test_ranks_with_the_same_tensors_have_the_same_fingerprint_and_share_them_out() -> None:
    planners = [Planner(rank, 3) for rank in range(3)]
    flats = [flatten(state(), rank=rank) for rank in range(3)]
    assert len({p.survey(f).fingerprint for p, f in zip(planners, flats, strict=True)}) == 1
    plans = [p.plan(f, refused) for p, f in zip(planners, flats, strict=True)]
    written = [item.piece.name for plan in plans for item in plan.placed]
    assert sorted(written) == sorted(flats[0].tensors)


@pytest.mark.parametrize(
    "change", [*CHANGES, a_key_that_looks_like_nesting], ids=lambda change: change.__name__
)
def test_what_is_saved_after_a_change_is_the_changed_state(tmp_path: Path, change: Change) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state(), 1)
        changed = state()
        change(changed)
        checkpointer.save(changed, 2)
        checkpointer.wait()
    back = load_generation(tmp_path, step=2)
    assert back.keys() == changed.keys()
    assert back["model"].keys() == changed["model"].keys()
    live, found = flatten(changed).tensors, flatten(back).tensors
    for one, other in zip(live.values(), found.values(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
