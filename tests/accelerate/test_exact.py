"""A run that is ended and resumed is, bit for bit, the run that was left alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accelerate_ckpt import CheckpointPlugin, attach
from tests.accelerate.job import Interrupted, committed, reset, run, train

SAME = ("model", "optimizer", "random")
MIDDLE = {"save_at": [14]}  # of 33 batches in 3 epochs
LAST = {"save_at": [22]}  # the last one of an epoch
EPOCHS = {"save_epochs": True, "cut": 15}
STATEFUL = {"stateful": True, "style": "direct"}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reset()
    yield
    reset()
    torch.set_num_threads(threads)


def check_exact(folder: Path, case: dict[str, Any]) -> None:
    whole = train({**case, "root": str(folder / "whole")})
    job = {**case, "root": str(folder / "cut")}
    reset()
    with pytest.raises(Interrupted):
        train({**job, "interrupt_at": case.get("cut", case.get("save_at", [14])[-1] + 2)})
    reset()
    random.random()  # what the process draws by itself must not matter
    again = train({**job, "seed": 99})
    count = len(again["seen"])
    assert 0 < count < len(whole["seen"])
    assert again["seen"] == whole["seen"][-count:]
    assert {key: again[key] for key in SAME} == {key: whole[key] for key in SAME}


FAST = {
    "mid-epoch": MIDDLE,
    "last batch": LAST,
    "between epochs, seedable": {**EPOCHS, "seedable": True},
    "seedable with set_epoch": {**MIDDLE, "seedable": True, "set_epoch": True},
    "seedable in an accumulation": {**MIDDLE, "seedable": True, "accumulate": 3},
    "saved by itself": {"plugin": {"every": 3}, "cut": 15},
    "workers": {**MIDDLE, "workers": 2, "seedable": True},
    "stateful": {**MIDDLE, **STATEFUL},
}
SLOW = {
    "seedable": {**MIDDLE, "seedable": True},
    "last batch, seedable": {**LAST, "seedable": True},
    "last batch, workers": {**LAST, "workers": 2},
    "between epochs": EPOCHS,
    "in an accumulation": {"save_at": [15], "accumulate": 3},
    "passed over by hand": {**MIDDLE, "style": "manual"},
    "a loader's own generator": {**MIDDLE, "generator": True},
    "workers, not seedable": {**MIDDLE, "workers": 2},
    "workers whose batches are not read again": {
        **MIDDLE,
        "workers": 2,
        "noise": False,
        "plugin": {"skip": "fast"},
    },
    "stateful, last batch": {**LAST, **STATEFUL},
    "stateful between epochs": {**EPOCHS, **STATEFUL},
    "stateful with workers": {**MIDDLE, **STATEFUL, "workers": 2},
    "a stream": {**MIDDLE, "stream": True},
    "a stream with a worker": {**MIDDLE, "stream": True, "workers": 1},
    "dispatched": {**MIDDLE, "dispatch": True},
    "saved by itself at an epoch's end": {"plugin": {"every": 11}, "cut": 15, "seedable": True},
}


@pytest.mark.parametrize("name", FAST)
def test_ended_and_resumed_it_is_the_same_run(tmp_path: Path, name: str) -> None:
    check_exact(tmp_path, FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_ended_and_resumed_it_is_the_same_run_in_more_ways(tmp_path: Path, name: str) -> None:
    check_exact(tmp_path, SLOW[name])


def test_a_save_within_an_accumulation_is_not_torn_by_the_next_backward(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    net = torch.nn.Linear(1000, 2000)  # large enough for a backward to come before it is copied
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    with attach(accelerator, CheckpointPlugin(tmp_path, on_error="raise")) as checkpoints:
        for batch in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((4, 1000), float(batch))).sum())
                optimizer.step()
                optimizer.zero_grad()
            if batch == 3:
                gradient = net.weight.grad.clone()
            accelerator.save_state()
        checkpoints.wait()
        names = committed(str(tmp_path))
        assert len(names) == 6
        accelerator.load_state(names[3])
        assert torch.equal(gradient, net.weight.grad)  # type: ignore[arg-type]


def check_killed(folder: Path, case: dict[str, Any], world_size: int) -> None:
    """The same with SIGKILL, in processes of their own."""
    base = {"folder": str(folder), **case, "kill_at": None}
    whole = {**base, "root": str(folder / "whole"), "out": str(folder / "whole.json")}
    cut = {**base, "root": str(folder / "cut")}
    for done in run(whole, world_size):
        assert done.code == 0, done.log
    kill = {"kill_at": case.get("kill_at", 9), "after_commits": 1}
    for done in run({**cut, **kill}, world_size):
        assert done.code == -9, done.log
    for done in run({**cut, "out": str(folder / "again.json"), "seed": 77}, world_size):
        assert done.code == 0, done.log
    for rank in range(world_size):
        one, other = (
            json.loads((folder / f"{name}.json.{rank}").read_text()) for name in ("whole", "again")
        )
        assert other["seen"] == one["seen"][-len(other["seen"]) :]
        assert 0 < len(other["seen"]) < len(one["seen"])
        assert {key: other[key] for key in SAME} == {key: one[key] for key in SAME}


def test_killed_on_one_rank_it_is_the_same_run(tmp_path: Path) -> None:
    check_killed(tmp_path, {"plugin": {"every": 2}, "workers": 2, "kill_at": 17}, 1)


def test_killed_on_two_ranks_it_is_the_same_run_on_each(tmp_path: Path) -> None:
    check_killed(tmp_path, {"save_at": [7], "accumulate": 4, "kill_at": 13}, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"save_at": [7]},
        {"save_at": [6]},  # the last batch of an epoch
        {"save_at": [7], "seedable": True, "workers": 2},
        {"save_at": [7], "seedable": True, **STATEFUL},
        {"save_at": [7], "dispatch": True},
        {"save_at": [7], "stream": True},
        {"save_at": [7], "stream": True, "dispatch": False},
        {"plugin": {"every": 2}},
    ],
    ids=str,
)
def test_killed_on_two_ranks_in_more_ways(tmp_path: Path, case: dict[str, Any]) -> None:
    check_killed(tmp_path, case, 2)


@pytest.mark.slow
def test_on_another_number_of_ranks_the_epoch_goes_on_after_as_many_samples(
    tmp_path: Path,
) -> None:
    job = {"folder": str(tmp_path), "root": str(tmp_path / "run"), "save_at": [3], "seedable": True}
    killed = run({**job, "kill_at": 5, "after_commits": 1}, 2)
    assert [done.code for done in killed] == [-9, -9], killed[0].log
    seen = [line["seen"][1] for done in killed for line in done.lines if line["what"] == "batch"]
    before = {str(batch) for batch in [*seen[:3], *seen[5:8]]}  # three on each rank
    again = {**job, "epochs": 1, "save_at": [], "style": "position"}
    (done,) = run({**again, "out": str(tmp_path / "one.json")}, 1)
    assert done.code == 0, done.log
    assert "was saved on 2 ranks and is loaded on 1" in done.log
    result = json.loads((tmp_path / "one.json.0").read_text())
    assert result["position"] == [0, 6]
    after = {str(indices) for _, indices, _ in result["seen"]}
    assert len(after) == 5
    assert not before & after
