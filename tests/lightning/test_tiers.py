"""Checkpoints of Lightning go on to an archive, and come back from it when the folder is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_ckpt import CheckpointCallback, TwoBufferCheckpointIO
from tests.lightning.job import Net, loader, trainer_for
from torch_ckpt import KeepLast, load_generation


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.parent.name[5:15]) for path in root.glob("step-*/manifest.json"))


def train(folder: Path, run: str, epochs: int, **options: Any) -> Any:
    callback = CheckpointCallback(
        folder / run / "root",
        archive=folder / run / "archive",
        cache=folder / run / "cache",
        every_n_steps=3,
        keep=KeepLast(1),
    )
    torch.manual_seed(7)
    trainer = trainer_for(folder, callback, max_epochs=epochs, **options)
    trainer.fit(Net(), loader())
    return trainer


def test_a_run_whose_folder_is_lost_goes_on_from_the_archive(tmp_path: Path) -> None:
    train(tmp_path, "run", 1)
    root, archive, cache = (tmp_path / "run" / name for name in ("root", "archive", "cache"))
    assert len(steps_in(root)) == len(steps_in(cache)) == 1
    assert steps_in(archive)[-1:] == steps_in(root)
    assert len(steps_in(archive)) > 1
    shutil.rmtree(root)
    shutil.rmtree(cache)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    resumed = train(tmp_path, "run", 2, logger=logger)
    whole = train(tmp_path, "other", 2)
    assert resumed.global_step == whole.global_step
    for name, tensor in whole.lightning_module.state_dict().items():
        assert torch.equal(resumed.lightning_module.state_dict()[name], tensor), name
    assert "ckpt/archive_lag" in next(tmp_path.rglob("metrics.csv")).read_text()


def test_what_model_checkpoint_drops_stays_in_the_archive(tmp_path: Path) -> None:
    plugin = TwoBufferCheckpointIO(archive=tmp_path / "archive")
    files = ModelCheckpoint(tmp_path / "files", every_n_train_steps=2, save_top_k=1, monitor=None)
    trainer = trainer_for(tmp_path, files, plugins=[plugin], max_epochs=1)
    trainer.fit(Net(), loader())
    plugin.teardown()
    left = sorted(path.parent.name for path in tmp_path.glob("files/*/manifest.json"))
    there = sorted(path.parent.name for path in tmp_path.glob("archive/*/manifest.json"))
    assert len(left) == 1
    assert set(left) < set(there)
    assert load_generation(tmp_path / "archive", folder=there[0])["global_step"] == 2
