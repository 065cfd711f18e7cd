"""`attach` saves and resumes a Fabric loop under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn

from lightning_ckpt import attach
from tests.distributed.sharded_job import equal
from tests.lightning.job import run_ranks
from torch_ckpt import ConfigError, StateMismatch, load_generation


def job_in(folder: Path, mesh: Any, name: str = "run", **changed: Any) -> dict[str, Any]:
    return {
        "module": "tests.lightning.fabric_job",
        "folder": str(folder / f"{name}-work"),
        "root": str(folder / name),
        "out": str(folder / f"{name}.out"),
        "mesh": mesh,
        "until": 6,
        **changed,
    }


def train(job: dict[str, Any], ranks: int, code: int = 0) -> list[dict[str, Any]]:
    """What came out of a run, of every rank."""
    for rank in run_ranks(job, ranks):
        assert rank.code == code, rank.log[-4000:]
    return [torch.load(f"{job['out']}.{rank}") for rank in range(ranks)] if code == 0 else []


@pytest.mark.parametrize("mesh", ["ddp", [2, 1]], ids=["ddp", "fsdp"])
def test_a_killed_loop_goes_on_bitwise_as_if_it_had_not_been(tmp_path: Path, mesh: Any) -> None:
    whole = train(job_in(tmp_path, mesh, "whole"), 2)
    job = job_in(tmp_path, mesh)
    train({**job, "kill_at": 5}, 2, code=-9)
    again = train({**job, "seed": 7}, 2)
    for one, other in zip(again, whole, strict=True):
        assert one["from"] == 4
        assert one["losses"] == other["losses"][4:]
        assert equal(one["state"], other["state"]) == []
        assert one["scheduler"] == other["scheduler"]
        assert torch.equal(one["rng"], other["rng"])


@pytest.mark.slow
def test_each_number_of_ranks_and_each_strategy_goes_on_with_the_state_of_the_one_before(
    tmp_path: Path,
) -> None:
    job = job_in(tmp_path, "")
    saved: dict[str, Any] = {}
    meshes: list[tuple[int, Any]] = [(2, [2, 1]), (1, "auto"), (2, [1, 2]), (2, [2, 1])]
    for number, (ranks, mesh) in enumerate(meshes, start=1):
        found = train({**job, "mesh": mesh, "until": 2 * number, "seed": number}, ranks)
        for rank in found:
            assert rank["from"] == (2 * number - 2 or None)
            assert not saved or equal(rank["began"], saved) == [], mesh
        if mesh == [1, 2]:  # ranks that share a layer drop out the same
            assert torch.equal(found[0]["rng"], found[1]["rng"])
        saved = found[0]["state"]


def loop(**more: Any) -> tuple[Fabric, dict[str, Any]]:
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = nn.Linear(2, 2), None
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    return fabric, {"model": model, "optimizer": optimizer, "step": 0, **more}


def test_values_come_back_into_the_users_own_containers(tmp_path: Path) -> None:
    inner = {"best": 3.0}
    fabric, state = loop(parts=[{"again": None}], inner=inner, history=[1, 2])
    state["parts"][0]["again"] = state["model"]
    weights = {name: value.clone() for name, value in state["model"].state_dict().items()}
    with attach(fabric, tmp_path / "run") as checkpoints:
        other = {**state, "step": 7, "inner": {"best": 1.0}, "history": [4]}
        checkpoints.save(7, other, block="staged")
        with torch.no_grad():
            state["model"].weight.zero_()
        history, model = state["history"], state["model"]
        checkpoints.wait()
        generation = checkpoints.resume(state)
    assert generation is not None
    assert generation.step == state["step"] == 7
    assert state["model"] is model
    assert equal(dict(model.state_dict()), weights) == []
    assert inner == {"best": 1.0}
    assert history == [4]


def test_what_is_stored_has_the_plain_names_of_the_model(tmp_path: Path) -> None:
    fabric, state = loop()
    with attach(fabric, tmp_path / "run", rng=False) as checkpoints:
        checkpoints.save(1, state, block="committed")
    assert load_generation(tmp_path / "run")["model"].keys() == {"weight", "bias"}


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    fabric, state = loop()
    with attach(fabric, tmp_path / "run") as checkpoints:
        checkpoints.save(1, state, block="committed")
        drawn = torch.rand(3)
        checkpoints.resume(state)
    assert torch.equal(torch.rand(3), drawn)


def test_a_loop_that_was_never_saved_starts_afresh(tmp_path: Path) -> None:
    fabric, state = loop()
    with attach(fabric, tmp_path / "run") as checkpoints:
        assert checkpoints.resume(state) is None
    assert state["step"] == 0


def test_another_model_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    fabric, state = loop()
    with attach(fabric, tmp_path / "run") as checkpoints:
        checkpoints.save(1, {**state, "step": 1}, block="committed")
        other = {**state, "model": fabric.setup(nn.Linear(3, 2))}
        with pytest.raises(StateMismatch, match="weight"):
            checkpoints.resume(other)
    assert other["step"] == 0


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy"])
def test_a_strategy_that_cannot_be_served_is_refused_by_name(tmp_path: Path, name: str) -> None:
    fabric = Fabric(accelerator="cpu", strategy=type(name, (DDPStrategy,), {})())
    with pytest.raises(ConfigError, match=f"attach cannot save with {name}"):
        attach(fabric, tmp_path / "run")


@pytest.mark.parametrize("strategy", [DDPStrategy(), ModelParallelStrategy(lambda m, _: m)])
def test_attaching_before_the_ranks_run_says_what_to_call_first(
    tmp_path: Path, strategy: Any
) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    with pytest.raises(ConfigError, match=r"call fabric\.launch\(\)"):
        attach(fabric, tmp_path / "run")


def test_a_key_that_is_taken_or_a_state_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    fabric, state = loop()
    with attach(fabric, tmp_path / "run") as checkpoints:
        with pytest.raises(ConfigError, match="'torch_ckpt' of a state is taken"):
            checkpoints.save(1, {**state, "torch_ckpt": 1})
        with pytest.raises(ConfigError, match="must be a dict"):
            checkpoints.save(1, [state])  # type: ignore[arg-type]
