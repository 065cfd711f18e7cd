"""The callback saves behind training what the state was, and starts where the user would want."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner

from lightning_ckpt import CheckpointCallback, TwoBufferCheckpointIO
from lightning_ckpt.reading import read_checkpoint
from tests.lightning.fitting import averaging, fit, generations, saving
from tests.lightning.job import Net, loader, trainer_for
from torch_ckpt import (
    ConfigError,
    KeepBest,
    KeepLast,
)


class Witness(Net):
    """Copies everything, at once, right after the callbacks' own turn."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: dict[int, Any] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        live = {
            "state_dict": self.state_dict(),
            "optimizer_states": [o.state_dict() for o in self.trainer.optimizers],
        }
        self.seen[self.trainer.global_step] = copy.deepcopy(live)


def test_an_overlapped_save_holds_the_state_of_its_step_and_nothing_later(tmp_path: Path) -> None:
    model = Witness()
    fit(tmp_path, saving(tmp_path), model=model)
    found = generations(tmp_path)
    assert sorted(found) == [3, 6, 9, 12, 15, 16]
    for step in (3, 6, 9, 12, 15):
        saved = read_checkpoint(found[step].url)
        for name, value in model.seen[step]["state_dict"].items():
            assert torch.equal(saved["state_dict"][name], value), (step, name)
        state = saved["optimizer_states"][0]["state"]
        for index, moments in model.seen[step]["optimizer_states"][0]["state"].items():
            for name, value in moments.items():
                assert torch.equal(state[index][name], value), (step, index, name)


def test_averaged_weights_that_are_swapped_in_for_validation_do_not_get_into_the_live_ones(
    tmp_path: Path,
) -> None:
    model = Witness()
    fit(tmp_path, saving(tmp_path), averaging(decay=0.5), model=model, val_check_interval=3)
    found = generations(tmp_path)
    for step in (3, 6, 9):
        saved = read_checkpoint(found[step].url)["current_model_state"]
        for name, value in model.seen[step]["state_dict"].items():
            assert torch.equal(saved[name], value), (step, name)


class Clamping(Net):
    """Changes parameters after the optimizer did, where no hook of a callback can see it."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)


def test_a_state_that_changes_behind_a_save_is_discarded_once_and_then_copied_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, saving(tmp_path), model=Clamping())
    assert "copies everything before training goes on" in caplog.text
    assert {9, 12, 15, 16} <= set(generations(tmp_path))


class TwoOptimizers(Net):
    """Trains by hand, with two steps a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first, last = self.net[0].parameters(), self.net[3].parameters()
        return torch.optim.AdamW(first, 0.01), torch.optim.SGD(last, 0.01, momentum=0.9)


def test_manual_optimization_with_two_optimizers_saves_each_time_an_interval_is_crossed(
    tmp_path: Path,
) -> None:
    fit(tmp_path, saving(tmp_path, every_n_steps=5), model=TwoOptimizers(), max_epochs=1)
    assert sorted(generations(tmp_path)) == [6, 10, 16]


def test_without_an_interval_every_epoch_is_saved_and_minutes_count_too(tmp_path: Path) -> None:
    fit(tmp_path, CheckpointCallback(tmp_path / "run", keep=None))
    assert sorted(generations(tmp_path)) == [8, 16]
    minutes = CheckpointCallback(tmp_path / "m" / "run", keep=None, every_minutes=1e-9)
    fit(tmp_path, minutes, max_epochs=1)
    assert sorted(generations(tmp_path / "m")) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_one_info_line_a_save_and_numbers_in_logged_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trainer = fit(tmp_path, saving(tmp_path), logger=CSVLogger(tmp_path))
    lines = [record.getMessage() for record in caplog.records if "committed" in record.message]
    assert sum("step 9 " in line for line in lines) == 1
    logged = trainer.logged_metrics
    assert logged["ckpt/lag_steps"] == 0
    assert logged["ckpt/bytes"] > 1000
    assert logged["ckpt/blocked_s"] > 0
    assert logged["ckpt/persist_s"] > 0


class Recorder(CSVLogger):
    """Keeps at which steps it was given numbers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.steps: list[int | None] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.steps.append(step)


def test_the_last_numbers_come_at_a_step_as_lightning_counts_them_for_loggers(
    tmp_path: Path,
) -> None:
    logger = Recorder(tmp_path)
    fit(tmp_path, saving(tmp_path), model=TwoOptimizers(), max_epochs=1, logger=logger)
    assert logger.steps[-1] == 8, "batches, of which each has two optimizer steps"


def test_a_logger_that_raises_at_the_end_takes_no_save_with_it(tmp_path: Path) -> None:
    class Broken(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if "ckpt/lag_steps" in metrics and metrics["ckpt/lag_steps"] == 0 and step == 8:
                raise ConnectionError("no such host")

    callback = saving(tmp_path, every_n_steps=8)
    with pytest.raises(ConnectionError, match="no such host"):
        fit(tmp_path, callback, max_epochs=1, logger=Broken(tmp_path))
    assert sorted(generations(tmp_path)) == [8]


def test_without_a_logger_no_metric_is_added(tmp_path: Path) -> None:
    assert not any(
        name.startswith("ckpt/") for name in fit(tmp_path, saving(tmp_path)).logged_metrics
    )


def test_fast_dev_run_saves_nothing(tmp_path: Path) -> None:
    fit(tmp_path, saving(tmp_path, every_n_steps=1), fast_dev_run=True)
    assert generations(tmp_path) == {}


def test_an_error_in_training_leaves_what_was_saved_before_and_is_raised(tmp_path: Path) -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 7:
                raise ZeroDivisionError("as planned")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError, match="as planned"):
        fit(tmp_path, saving(tmp_path), model=Failing())
    assert sorted(generations(tmp_path)) == [3, 6]


class Measured(Net):
    """Has a validation loss that is best in the middle."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(abs(self.trainer.global_step - 16)))


def test_keep_best_ranks_validated_steps_only_and_best_model_path_names_the_best(
    tmp_path: Path,
) -> None:
    callback = saving(tmp_path, keep=KeepBest("val_loss") | KeepLast(1))
    trainer = fit(tmp_path, callback, model=Measured(), max_epochs=4)
    found = generations(tmp_path)
    assert sorted(found) == [16, 32]
    assert found[16].manifest.metrics["val_loss"] == 0
    assert callback.best_model_path == found[16].url
    assert callback.last_model_path == found[32].url
    assert trainer.validate(ckpt_path="best", dataloaders=loader(), verbose=False)


def test_a_step_between_validations_does_not_carry_the_metrics_of_the_last_one(
    tmp_path: Path,
) -> None:
    fit(tmp_path, saving(tmp_path), max_epochs=1)
    fit(tmp_path, saving(tmp_path), max_epochs=2)
    metrics = {step: one.manifest.metrics for step, one in generations(tmp_path).items()}
    assert "val_loss" in metrics[8]
    assert not any("val_loss" in metrics[step] for step in (3, 6, 9, 12, 15))
    assert all("train_loss" in metrics[step] for step in metrics)


def test_a_metric_that_keep_best_will_never_find_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, saving(tmp_path, keep=KeepBest("accuracy")))
    assert (
        "KeepBest('accuracy') finds no such metric among ['train_loss', 'val_loss'" in caplog.text
    )


def test_the_learning_rate_finder_works_beside_it(tmp_path: Path) -> None:
    fit(tmp_path, saving(tmp_path), max_steps=4, validated=False)
    trainer = trainer_for(tmp_path, saving(tmp_path), max_epochs=2)
    model = Net()
    found = Tuner(trainer).lr_find(model, loader(), num_training=10)
    assert found is not None
    trainer.fit(model, loader())
    assert trainer.global_step == 16
    assert list(tmp_path.glob(".lr_find*")) == []


def test_model_checkpoint_beside_it_still_writes_its_files(tmp_path: Path) -> None:
    files = ModelCheckpoint(tmp_path / "files", monitor="val_loss", save_last=True)
    fit(tmp_path, saving(tmp_path), files)
    assert Path(files.best_model_path).is_file()
    assert "state_dict" in torch.load(files.last_model_path, weights_only=True)


def test_it_suppresses_the_default_model_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, saving(tmp_path))
    assert list(tmp_path.rglob("*.ckpt")) == []


def test_a_trainer_of_the_older_package_takes_it(tmp_path: Path) -> None:
    import pytorch_lightning

    from tests.lightning.job import net_for

    model = net_for(pytorch_lightning)
    for steps in (4, 6):
        trainer = trainer_for(
            tmp_path, saving(tmp_path), package=pytorch_lightning, max_steps=steps
        )
        trainer.fit(model(), loader())
    assert sorted(generations(tmp_path)) == [3, 4, 6]


@pytest.mark.parametrize(
    "options",
    [
        {"every_n_steps": 0},
        {"every_n_steps": 2.5},
        {"every_minutes": -1},
        {"every_minutes": float("nan")},
        {"keep": 3},
        {"resume": "sometimes"},
        {"mode": "slow"},
        {"slabs": 3},
        {"skip": "all"},
        {"on_error": "ignore"},
        {"commit_timeout_s": 0},
    ],
)
def test_an_option_that_cannot_be_used_is_refused_at_construction(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        CheckpointCallback(tmp_path, **options)


def test_an_unknown_option_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="every_n_batches"):
        saving(tmp_path, every_n_batches=3)


def test_a_strategy_that_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    class DeepSpeedStrategy(DDPStrategy):
        """Stands for the real one, which needs its package."""

    strategy = DeepSpeedStrategy(cluster_environment=None)
    callback = saving(tmp_path)
    with pytest.raises(ConfigError, match="DeepSpeed"):
        callback.setup(type("Trainer", (), {"strategy": strategy})(), None, "fit")


def test_it_travels_to_another_process_with_its_options(tmp_path: Path) -> None:
    callback = saving(tmp_path, keep=KeepLast(2) | KeepBest("val_loss"))
    copied = pickle.loads(pickle.dumps(callback))
    assert isinstance(copied, OnExceptionCheckpoint)
    assert copied.__reduce__()[1][1] == callback.__reduce__()[1][1]


def test_ranks_started_by_spawn_save_together_and_hand_weights_and_best_path_back(
    tmp_path: Path,
) -> None:
    callback, files = saving(tmp_path), ModelCheckpoint(tmp_path / "files")
    options = {"devices": 2, "strategy": "ddp_spawn", "max_epochs": 1, "logger": False}
    plugins = [TwoBufferCheckpointIO()]  # it is asked for a file after its teardown
    trainer = trainer_for(tmp_path, callback, files, plugins=plugins, **options)
    model = Net()
    trainer.fit(model, loader(), loader())
    found = generations(tmp_path)
    assert sorted(found) == [3, 4]
    assert found[4].manifest.world_size == 2
    assert callback.best_model_path == found[4].url
    for path in (found[4].url, next((tmp_path / "files").glob("*.ckpt"))):
        for name, value in read_checkpoint(path)["state_dict"].items():
            assert torch.equal(model.state_dict()[name], value)
