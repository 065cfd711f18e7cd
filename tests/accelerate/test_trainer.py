"""A Hugging Face Trainer with `TrainerCheckpoint`: killed and resumed it is the same run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerate.trainer_job import SAME, Interrupted, run, train

MIDDLE = {"args": {"save_steps": 4}, "cut": 10}  # 6 steps an epoch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_same(whole: dict[str, Any], again: dict[str, Any]) -> None:
    count = len(again["seen"])
    assert 0 < count < len(whole["seen"])
    assert again["seen"] == whole["seen"][-count:]
    assert {key: again[key] for key in SAME} == {key: whole[key] for key in SAME}
    assert again["history"] == whole["history"]
    assert again["best"] == whole["best"]


def check_exact(folder: Path, case: dict[str, Any]) -> None:
    base = {**case, "folder": str(folder)}
    whole = train({**base, "root": str(folder / "whole")})
    cut = {**base, "root": str(folder / "cut")}
    with pytest.raises(Interrupted):
        train({**cut, "interrupt_at": case.get("cut", 10)})
    check_same(whole, train({**cut, "seed": 99}))


FAST = {
    "mid-epoch": MIDDLE,
    "accumulation": {
        "args": {"gradient_accumulation_steps": 2, "save_steps": 5, "max_steps": 8},
        "cut": 7,
    },
}
EVAL = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "loss"}
SLOW = {
    "the end of an epoch": {"args": {"save_steps": 6}, "cut": 8},
    "workers": {"args": {"dataloader_num_workers": 2, "save_steps": 4}, "cut": 10},
    "every epoch": {"args": {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 3}},
    "an order drawn from the global generator": {
        "args": {"accelerator_config": {"use_seedable_sampler": False}, "save_steps": 4},
    },
    "best model": {"args": {**EVAL, "load_best_model_at_end": True}, "cut": 7},
    "early stopping": {
        "args": {**EVAL, "max_steps": 30, "learning_rate": 0.3, "load_best_model_at_end": True},
        "patience": 3,
        "cut": 5,
    },
    "data_seed": {"args": {"data_seed": 5, "save_steps": 4}},
    "evaluated at the start": {"args": {**EVAL, "eval_on_start": True}, "cut": 5},
    "logged between saves": {"args": {"logging_steps": 5, "save_steps": 4}},
    "a second epoch in the middle": {"args": {"save_steps": 8}, "cut": 9},
    "eager": {"options": {"overlap": False}},
}


@pytest.mark.parametrize("name", FAST)
def test_ended_and_resumed_it_is_the_same_run(tmp_path: Path, name: str) -> None:
    check_exact(tmp_path, FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_ended_and_resumed_it_is_the_same_run_in_more_ways(tmp_path: Path, name: str) -> None:
    check_exact(tmp_path, SLOW[name])


def test_killed_twice_and_ended_by_sigterm_twice_it_is_the_same_run(tmp_path: Path) -> None:
    base = {"folder": str(tmp_path)}
    cut = {**base, "root": str(tmp_path / "cut")}
    whole, *stopped, again = run(
        {**base, "root": str(tmp_path / "whole")},
        {**cut, "kill_at": 6, "after_commits": 1},
        {**cut, "kill_in_save": 8},
        {**cut, "terminate_within": 9},  # between a backward pass and its step
        {**cut, "terminate_at": 11, "args": {"enable_jit_checkpoint": True}},
        {**cut, "seed": 9},
    )
    assert (whole.code, again.code) == (0, 0), again.log
    assert [one.code for one in stopped] == [-9, -9, 143, 0], stopped[-1].log
    assert stopped[1].log.count("goes on after step 4 ") == 1
    assert stopped[3].result["step"] == 11
    assert "goes on after step 10 " in stopped[3].log
    assert "goes on after step 11 " in again.log
    assert not (tmp_path / "trainer" / "checkpoint-11").exists()
    check_same(whole.result, again.result)  # type: ignore[arg-type]


@pytest.mark.slow
def test_killed_on_two_ranks_it_is_the_same_run_on_each(tmp_path: Path) -> None:
    base = {"folder": str(tmp_path), "ranks": 2, "args": {"save_steps": 2, "max_steps": 8}}
    cut = {**base, "root": str(tmp_path / "cut")}
    done = run(
        {**base, "root": str(tmp_path / "whole")},
        {**cut, "kill_at": 5, "after_commits": 2},
        {**cut, "terminate_at": 7},  # on one rank only
        {**cut, "seed": 9},
        timeout_s=240,
    )
    whole, killed, ended, again = (done[place : place + 2] for place in range(0, 8, 2))
    assert [one.code for one in whole + again] == [0] * 4, again[0].log + again[1].log
    assert [one.code for one in killed] == [-9, -9]
    assert [one.code for one in ended] == [143, 143], ended[0].log
    assert "goes on after step 4 " in ended[1].log
    assert "goes on after step 7 " in again[0].log
    for one, other in zip(whole, again, strict=True):
        check_same(one.result, other.result)  # type: ignore[arg-type]
