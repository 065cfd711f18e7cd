"""`load_state` of what is not this run's, or lacks something, is explained and never silent."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_ckpt import CheckpointPlugin
from accelerate_ckpt.wrappers import unwrapped
from tests.accelerate.job import reset, run
from tests.accelerate.test_saves import Run
from torch_ckpt import (
    Checkpointer,
    CkptError,
    ConfigError,
    FormatError,
    GenerationNotFound,
    NothingUsable,
    StateMismatch,
)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    yield
    reset()


def saved(folder: Path, steps: int) -> list[torch.Tensor]:
    job = Run(folder)
    weights = []
    for _ in range(steps):
        job.step()
        job.accelerator.save_state()
        weights.append(unwrapped(job.net).weight.detach().clone())
    job.checkpoints.close()
    return weights


def test_a_generation_of_another_run_is_not_taken_for_ours_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, _ = saved(tmp_path / "ours", 1), saved(tmp_path / "theirs", 2)
    theirs = tmp_path / "theirs" / "checkpoints" / "checkpoint_0"
    job = Run(tmp_path / "ours")
    before = job.weight()
    with pytest.raises(ConfigError, match="checkpoint_0 is a generation of another root") as told:
        job.accelerator.load_state(str(theirs))
    assert f"root='{theirs.parent}'" in str(told.value)
    assert torch.equal(job.weight(), before)
    monkeypatch.chdir(tmp_path / "ours")
    for same in ("checkpoints/checkpoint_0", "not/there/checkpoint_0"):  # as save_state takes it
        job.accelerator.load_state(same)
        assert torch.equal(job.weight(), ours[0])
    with caplog.at_level(logging.WARNING):
        job.accelerator.load_state("s3://elsewhere/checkpoint_0")
    assert "s3://elsewhere/checkpoint_0 is looked for as" in caplog.text
    job.checkpoints.close()


def test_a_folder_of_something_else_and_a_state_of_another_program_are_named(
    tmp_path: Path,
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"of another program")
    with Checkpointer(str(tmp_path / "checkpoints"), distributed=False) as saver:
        saver.save({"model": {"weight": torch.zeros(3)}}, 1)
    job = Run(tmp_path)
    with pytest.raises(GenerationNotFound, match="neither a generation in"):
        job.accelerator.load_state(str(foreign))
    with pytest.raises(StateMismatch, match="missing from the generation: accelerate"):
        job.accelerator.load_state()
    job.checkpoints.close()


def test_a_lost_file_is_not_taken_for_a_first_run(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    newest = tmp_path / "checkpoints" / "checkpoint_0"
    (lost,) = newest.glob("*.safetensors")
    lost.unlink()
    job = Run(tmp_path)
    with pytest.raises(FormatError, match=f"{lost.name}: is missing") as told:
        job.accelerator.load_state(str(newest))
    assert not isinstance(told.value, FileNotFoundError)
    with pytest.raises(NothingUsable):
        job.accelerator.load_state()
    job.checkpoints.close()


def lacking(job: dict[str, Any]) -> None:
    """Two saves; a file of rank 1 in the newer is lost; what its name and what `None` load."""
    folder = Path(job["folder"])
    saved(folder, 2)
    run_ = Run(folder, CheckpointPlugin(timeout_s=30))
    newest = folder / "checkpoints" / "checkpoint_1"
    if run_.accelerator.is_main_process:
        (lost,) = newest.glob(job["lost"])
        lost.unlink()
    run_.accelerator.wait_for_everyone()
    said = None
    try:
        run_.accelerator.load_state(str(newest))
    except CkptError as error:
        said = str(error)
    run_.accelerator.load_state()
    print(json.dumps({"said": said, "step": run_.checkpoints.step}), flush=True)
    run_.accelerator.end_training()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["rank-00001.*.json", "rank-00001.*.safetensors"])
def test_without_a_file_of_one_rank_all_ranks_are_told_and_step_back(
    tmp_path: Path, lost: str
) -> None:
    main = "tests.accelerate.test_foreign:lacking"
    for done in run({"folder": str(tmp_path), "main": main, "lost": lost}, 2):
        assert done.code == 0, done.log
        assert done.lines[0]["step"] == 1
        assert "rank-00001" in done.lines[0]["said"], done.lines
