"""The callback starts where the user would want: newest, asked for, sound, or not at all."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from omegaconf import OmegaConf

from lightning_ckpt.reading import open_checkpoint
from tests.lightning.fitting import Starts, fit, generations, saving
from tests.lightning.job import Net, loader, trainer_for
from torch_ckpt import (
    ConfigError,
    Generation,
    NothingUsable,
    PickleRefused,
)


def test_a_first_run_starts_and_the_next_continues_at_the_newest_step(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lightning_ckpt")
    starts = Starts()
    fit(tmp_path, saving(tmp_path), starts, max_steps=7)
    assert "this run starts afresh" in caplog.text
    fit(tmp_path, saving(tmp_path), starts, max_steps=12)
    assert starts.steps == [0, 7]
    assert "the newest generation is step 7" in caplog.text
    said = [str(warning.message) for warning in recwarn]
    assert not any("without a model" in text or "last checkpoint" in text for text in said)


def test_an_explicit_file_wins_over_a_newer_generation(tmp_path: Path) -> None:
    plain = fit(tmp_path, max_steps=4)
    plain.save_checkpoint(tmp_path / "four.ckpt")
    starts = Starts()
    fit(tmp_path, saving(tmp_path), max_steps=9)
    fit(tmp_path, saving(tmp_path), starts, max_steps=7, ckpt_path=tmp_path / "four.ckpt")
    fit(tmp_path, saving(tmp_path), starts, max_steps=8)
    assert starts.steps == [4, 7]  # 7 of the new line, and not 9 of the one that was left


def test_an_explicit_generation_wins_and_what_was_newer_is_set_aside(tmp_path: Path) -> None:
    fit(tmp_path, saving(tmp_path), max_steps=9)
    starts = Starts()
    older = generations(tmp_path)[3].url
    fit(tmp_path, saving(tmp_path), starts, max_steps=5, ckpt_path=older)
    assert starts.steps == [3]
    found = generations(tmp_path)
    assert {step for step, one in found.items() if "aside" in one.tags} == {6, 9}
    fit(tmp_path, saving(tmp_path), starts, max_steps=6)
    assert starts.steps == [3, 5]


def damage(generation: Generation) -> None:
    shard = next(Path(generation.url).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)


def test_a_damaged_generation_is_left_loudly_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, saving(tmp_path), max_steps=8)
    damage(generations(tmp_path)[8])
    starts = Starts()
    fit(tmp_path, saving(tmp_path), starts, max_steps=9)
    assert starts.steps == [6]
    assert "stepping back from step-0000000008" in caplog.text
    assert "damaged" in generations(tmp_path)[8].tags


def test_damage_everywhere_is_an_error_and_never_a_silent_fresh_start(tmp_path: Path) -> None:
    fit(tmp_path, saving(tmp_path), max_steps=4)
    for generation in generations(tmp_path).values():
        damage(generation)
    with pytest.raises(NothingUsable):
        fit(tmp_path, saving(tmp_path), max_steps=9)
    with pytest.raises(NothingUsable):
        fit(tmp_path, saving(tmp_path), max_steps=9)


def test_resume_never_starts_afresh_and_is_no_on_exception_checkpoint(tmp_path: Path) -> None:
    starts = Starts()
    last = ModelCheckpoint(tmp_path / "files", save_last=True, every_n_train_steps=2)
    fit(tmp_path, saving(tmp_path), last, max_steps=4)
    never = saving(tmp_path, resume="never")
    fit(tmp_path, never, starts, last, max_steps=4)
    fit(tmp_path, saving(tmp_path), starts, max_steps=5)
    assert starts.steps == [0, 4]
    assert not isinstance(never, OnExceptionCheckpoint)


def test_the_newer_step_wins_over_a_last_checkpoint_that_was_written_later(tmp_path: Path) -> None:
    fit(tmp_path, saving(tmp_path), max_steps=6)
    stale = fit(tmp_path, max_steps=2)
    (tmp_path / "files").mkdir()
    stale.save_checkpoint(tmp_path / "files" / "last.ckpt")
    starts = Starts()
    last = ModelCheckpoint(tmp_path / "files", save_last=True)
    fit(tmp_path, saving(tmp_path), last, starts, max_steps=8)
    assert starts.steps == [6]


@pytest.mark.parametrize(("hpc_step", "start"), [(4, 6), (7, 7)])
def test_on_slurm_the_newer_of_hpc_checkpoint_and_generation_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hpc_step: int, start: int
) -> None:
    fit(tmp_path, saving(tmp_path), max_steps=6)
    hpc = fit(tmp_path, max_steps=hpc_step)
    hpc.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    for name, value in (("NTASKS", "1"), ("JOB_NAME", "train"), ("JOB_ID", "1"), ("PROCID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv("SLURM_NODEID", "0")
    starts = Starts()
    fit(tmp_path, saving(tmp_path), starts, max_steps=9)
    assert starts.steps == [start]


def test_fit_validate_fit_with_one_callback_goes_on_where_it_was(tmp_path: Path) -> None:
    starts = Starts()
    trainer = trainer_for(tmp_path, saving(tmp_path), starts, max_epochs=1)
    model = Net()
    trainer.fit(model, loader(), loader())
    trainer.validate(model, loader(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(), loader())
    assert starts.steps == [0, 8]
    assert trainer.global_step == 16
    assert "save_checkpoint" not in vars(trainer.strategy)


def test_a_module_can_be_made_from_a_generation(tmp_path: Path) -> None:
    model = Net(width=16)
    fit(tmp_path, callback := saving(tmp_path), model=model)
    again = Net.load_from_checkpoint(open_checkpoint(callback.best_model_path))
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_a_tuner_that_drops_the_loaded_state_is_an_error_and_no_silent_start_from_zero(
    tmp_path: Path,
) -> None:
    finder = LearningRateFinder(num_training_steps=6, update_attr=False)
    fit(tmp_path, saving(tmp_path), finder, max_steps=4, validated=False)
    with pytest.raises(ConfigError, match="LearningRateFinder"):
        fit(tmp_path, saving(tmp_path), finder, max_steps=6, validated=False)


class Custom:
    """Something that only pickle can save."""


def test_custom_objects_need_weights_only_false_to_come_back(tmp_path: Path) -> None:
    config = OmegaConf.create({"a": [1, 2], "b": "${a}"})
    fit(tmp_path, saving(tmp_path), model=Net(extra=config), max_steps=3)
    fit(tmp_path, saving(tmp_path), model=Net(extra=config), max_steps=4)
    folder = tmp_path / "custom"
    fit(folder, saving(folder), model=Net(extra=Custom()), max_steps=3)
    with pytest.raises(PickleRefused, match=r"weights_only=False.*before 2\.6.*allow_pickle=True"):
        fit(folder, saving(folder), model=Net(), max_steps=4)
    starts = Starts()
    fit(folder, saving(folder, allow_pickle=True), starts, model=Net(), max_steps=4)
    if "weights_only" in inspect.signature(pl.Trainer.fit).parameters:  # since Lightning 2.6
        fit(folder, saving(folder), starts, model=Net(), max_steps=5, weights_only=False)
        assert starts.steps == [3, 4]
    assert starts.steps[0] == 3
