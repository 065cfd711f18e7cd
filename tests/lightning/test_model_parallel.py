"""Runs under a model-parallel strategy: FSDP2, tensor parallelism, on gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_ckpt import CheckpointCallback, read_checkpoint
from lightning_ckpt.paths import as_text
from tests.distributed.sharded_job import equal
from tests.lightning.fitting import averaging
from tests.lightning.job import committed, run_ranks
from tests.running import check_codes
from torch_ckpt import ConfigError


def job_in(folder: Path, name: str = "run", **changed: Any) -> dict[str, Any]:
    """A job of 6 steps, of 4 an epoch on two ranks, that saves every second."""
    return {
        "module": "tests.lightning.sharded_job",
        "folder": str(folder / f"{name}-work"),
        "root": str(folder / name),
        "out": str(folder / f"{name}.out"),
        "callback": {"every_n_steps": 2},
        "mesh": [2, 1],
        "trainer": {"max_steps": 6},
        **changed,
    }


def train(job: dict[str, Any], ranks: int = 2) -> list[dict[str, Any]]:
    """What came out of a run, of every rank."""
    check_codes(run_ranks(job, ranks), 0)
    return [torch.load(f"{job['out']}.{rank}") for rank in range(ranks)]


def assert_same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    for one, other in zip(left, right, strict=True):
        assert equal(one["state"], other["state"]) == []
        assert torch.equal(one["rng"], other["rng"])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What comes out of a run that nobody killed and nothing saved."""
    job = job_in(tmp_path_factory.mktemp("reference"))
    del job["root"]
    return train(job)


def test_saving_before_and_after_the_first_step_does_not_change_training(
    tmp_path: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    job = job_in(tmp_path, callback={"every_n_steps": 1, "keep": None})
    found = train(job)
    assert_same(found, uninterrupted)
    assert [rank["copied"] for rank in found] == [[], []]  # what was saved were the live tensors
    assert committed(job["root"], 1)


def test_a_killed_run_goes_on_bitwise_as_if_it_had_not_been(
    tmp_path: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    job = job_in(tmp_path)
    check_codes(run_ranks({**job, "kill_at": 3, "after_step": 2}), -9)
    again = train({**job, "seed": 7})
    assert_same(again, uninterrupted)
    assert [rank["losses"] for rank in again] == [rank["losses"][2:] for rank in uninterrupted]


def test_each_number_of_ranks_and_each_mesh_goes_on_with_the_state_of_the_one_before(
    tmp_path: Path,
) -> None:
    job = job_in(tmp_path)
    ended: dict[str, Any] = {}
    meshes = [(2, [2, 1]), (1, [1, 1]), (2, [1, 2]), (1, "auto"), (2, [2, 1])]
    for step, (ranks, mesh) in enumerate(meshes, start=1):
        again = {**job, "mesh": mesh, "trainer": {"max_steps": step}, "seed": step}
        found = train(again, ranks)
        for rank in found:
            assert len(rank["losses"]) == 1, mesh
            assert not ended or equal(rank["began"], ended) == [], mesh
        ended = found[0]["state"]
    check_evaluated(job, Path(job["root"]) / f"step-{len(meshes):010d}", ended)


def check_evaluated(job: dict[str, Any], path: Path, saved: dict[str, Any]) -> None:
    """`trainer.validate(ckpt_path=...)` sees the weights of a generation, each rank its part."""
    found = train({**job, "evaluate": str(path), "seed": 7})
    plain = read_checkpoint(path)["state_dict"]
    for name, value in found[0]["state"]["model"].items():
        assert torch.equal(plain[name], saved["model"][name])
        assert name == "seen" or torch.equal(value, plain[name])  # it counts validation too
    assert found[0]["found"] == found[1]["found"]


@pytest.mark.slow
def test_one_rank_less_and_one_more_for_the_same_data_give_close_losses(tmp_path: Path) -> None:
    tensor_parallel = [1, 2]
    whole = job_in(tmp_path, "whole", mesh=tensor_parallel, dropout=0.0)
    expected = train(whole)[0]["losses"]
    job = job_in(tmp_path, dropout=0.0)
    losses: list[float] = []
    for until, mesh in ((2, tensor_parallel), (4, [1, 1]), (6, tensor_parallel)):
        again = {**job, "mesh": mesh, "trainer": {"max_steps": until}, "seed": until - 2}
        found = train(again, mesh[1])
        losses += found[0]["losses"]
    assert losses == pytest.approx(expected, rel=1e-4)


def test_sigterm_between_batches_that_only_add_gradients_loses_none_of_them(tmp_path: Path) -> None:
    trainer = {"max_steps": 3, "accumulate_grad_batches": 2, "val_check_interval": 1}
    whole = job_in(tmp_path, "whole", trainer=trainer)
    expected = train(whole)
    job = job_in(tmp_path, trainer=trainer)
    check_codes(run_ranks({**job, "sigterm_at": 1}), 143)
    assert_same(train({**job, "seed": 7}), expected)


def test_a_plugin_that_the_strategy_reads_past_writes_files_that_can_be_read(
    tmp_path: Path,
) -> None:
    strategy = {"save_distributed_checkpoint": False}
    job = job_in(tmp_path, strategy=strategy, files=str(tmp_path / "files"))
    del job["root"]
    first = run_ranks({**job, "trainer": {"max_steps": 3}})
    check_codes(first, 0)
    assert "CheckpointCallback saves and resumes ModelParallelStrategy" in first[0].log
    path = tmp_path / "files" / "step=3.ckpt"
    assert path.is_file()
    again = run_ranks({**job, "trainer": {"max_steps": 4}, "fit": {"ckpt_path": str(path)}})
    assert [rank.steps("start") for rank in again] == [[3], [3]]


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "XLAFSDPStrategy"])
def test_a_strategy_that_cannot_be_served_is_refused_at_setup_by_name(
    tmp_path: Path, name: str
) -> None:
    strategy = type(name, (DDPStrategy,), {})(cluster_environment=None)
    trainer = type("Trainer", (), {"strategy": strategy, "callbacks": []})()
    with pytest.raises(ConfigError, match=f"cannot save with {name}"):
        CheckpointCallback(tmp_path / "run").setup(trainer, None, "fit")


def test_averaged_weights_are_refused_where_each_rank_has_a_part(tmp_path: Path) -> None:
    facts = {"strategy": ModelParallelStrategy(), "callbacks": [averaging()]}
    trainer = type("Trainer", (), facts)()
    with pytest.raises(ConfigError, match="EMAWeightAveraging does not support sharded models"):
        CheckpointCallback(tmp_path / "run").setup(trainer, None, "fit")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (Path("s3://bucket/run/step-1"), "s3://bucket/run/step-1"),
        (Path("file:///scratch/run"), "/scratch/run"),
        (Path("/scratch/run"), "/scratch/run"),
        ("s3://bucket/run", "s3://bucket/run"),
    ],
)
def test_a_url_that_went_through_a_path_is_one_again(path: Any, text: str) -> None:
    assert as_text(path) == text
