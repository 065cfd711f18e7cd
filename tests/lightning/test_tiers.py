"""Checkpoints of Lightning go on to an archive, and come back from it when the folder is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_ckpt import CheckpointCallback, TwoBufferCheckpointIO
from tests.lightning.job import Net, loader, trainer_for
from tests.lightning.plugged import checkpoint, same
from torch_ckpt import GenerationNotFound, KeepLast, load_generation


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


def fit(folder: Path, plugin: TwoBufferCheckpointIO, epochs: int, **options: Any) -> Any:
    files = ModelCheckpoint(folder / "files", every_n_train_steps=4, save_top_k=-1, monitor=None)
    torch.manual_seed(7)
    trainer = trainer_for(folder, files, plugins=[plugin], max_epochs=epochs)
    trainer.fit(Net(), loader(), **options)
    plugin.teardown()
    return trainer


def test_a_named_checkpoint_whose_folder_is_lost_is_trained_on_from_the_archive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = tmp_path / "archive"
    fit(tmp_path, TwoBufferCheckpointIO(archive=archive), 1)
    named = min((tmp_path / "files").glob("*/manifest.json")).parent
    kept = shutil.copytree(tmp_path / "files", tmp_path / "kept") / named.name
    shutil.rmtree(tmp_path / "files")
    resumed = fit(tmp_path, TwoBufferCheckpointIO(archive=archive), 2, ckpt_path=str(named))
    assert f"{named} is not there; {archive / named.name} is read instead" in caplog.text
    other = tmp_path / "other"
    expected = fit(other, TwoBufferCheckpointIO(), 2, ckpt_path=str(kept))
    assert resumed.global_step == expected.global_step
    assert same(resumed.lightning_module.state_dict(), expected.lightning_module.state_dict())


def test_an_archive_behind_a_url_gives_back_what_the_folder_lost(tmp_path: Path) -> None:
    plugin = TwoBufferCheckpointIO()
    plugin.save_checkpoint(checkpoint(3), tmp_path / "files" / "a.ckpt")
    plugin.teardown()
    memory, url = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    memory.put(str(tmp_path / "files"), url, recursive=True)  # a writer has a memory of its own
    shutil.rmtree(tmp_path / "files")
    try:
        found = TwoBufferCheckpointIO(archive=url).load_checkpoint(tmp_path / "files" / "a.ckpt")
    finally:
        memory.rm(url, recursive=True)
    assert same(found, checkpoint(3))
    assert not (tmp_path / "files").exists()


def test_what_neither_folder_nor_archive_has_is_said_of_both(tmp_path: Path) -> None:
    plugin = TwoBufferCheckpointIO(archive=tmp_path / "archive")
    plugin.save_checkpoint(checkpoint(3), tmp_path / "files" / "a.ckpt")
    plugin.teardown()
    with pytest.raises(GenerationNotFound) as raised:
        plugin.load_checkpoint(tmp_path / "files" / "b.ckpt")
    for named in (tmp_path / "files", tmp_path / "archive", "'b.ckpt'"):
        assert str(named) in str(raised.value)


def test_a_lone_process_reads_a_lost_checkpoint_from_the_cache_unless_it_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, archive, cache = (tmp_path / name for name in ("files", "archive", "cache"))
    plugin = TwoBufferCheckpointIO(archive=archive, cache=cache)
    plugin.save_checkpoint(checkpoint(3), files / "a.ckpt")
    plugin.teardown()
    shutil.rmtree(files)
    assert same(plugin.load_checkpoint(files / "a.ckpt"), checkpoint(3))
    assert f"{cache / 'a.ckpt'} is read instead" in caplog.text
    (shard,) = (cache / "a.ckpt").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert same(plugin.load_checkpoint(files / "a.ckpt"), checkpoint(3))
    assert f"{archive / 'a.ckpt'} is read instead" in caplog.text
    shard.unlink()
    assert same(plugin.load_checkpoint(files / "a.ckpt"), checkpoint(3))
