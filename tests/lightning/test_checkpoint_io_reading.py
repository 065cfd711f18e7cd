"""What the plugin reads: its own generations and ordinary files, as Lightning asks for them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_ckpt import TwoBufferCheckpointIO
from tests.lightning.job import Net, loader, trainer_for
from tests.lightning.plugged import checkpoint, checkpoints_of, same, trainer_with
from torch_ckpt import IntegrityError, PickleRefused


class Scaled(Net):
    """Has a batch size to tune."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(loader().dataset, self.batch_size)

    val_dataloader = train_dataloader


def test_the_tuner_reads_what_it_has_just_written_and_leaves_nothing(tmp_path: Path) -> None:
    trainer = trainer_with(TwoBufferCheckpointIO(), tmp_path, max_epochs=1)
    model = Scaled()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert Tuner(trainer).lr_find(model, num_training=6, update_attr=False)
    assert Tuner(trainer).scale_batch_size(model, max_trials=2, steps_per_trial=1)
    assert same(dict(model.state_dict()), before)
    assert [path for path in tmp_path.iterdir() if path.name != "checkpoints"] == []


def test_ordinary_checkpoints_load_with_the_meaning_of_weights_only(tmp_path: Path) -> None:
    stock = trainer_for(tmp_path, max_epochs=1)
    stock.fit(Net(), loader())
    stock.save_checkpoint(tmp_path / "stock.ckpt")
    torch.save({**checkpoint(1), "object": Custom()}, tmp_path / "custom.ckpt")
    plugin = TwoBufferCheckpointIO()
    trainer = trainer_with(plugin, tmp_path, max_epochs=2)
    trainer.fit(Net(), loader(), ckpt_path=tmp_path / "stock.ckpt")
    assert trainer.global_step == 16
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        plugin.load_checkpoint(tmp_path / "custom.ckpt")
    loaded = plugin.load_checkpoint(tmp_path / "custom.ckpt", weights_only=False)
    assert isinstance(loaded["object"], Custom)


class Custom:
    """Something that only pickle can save."""


def test_custom_objects_come_back_only_where_that_was_allowed(tmp_path: Path) -> None:
    plugin = TwoBufferCheckpointIO()
    plugin.save_checkpoint({**checkpoint(1), "object": Custom()}, tmp_path / "1.ckpt")
    for weights_only in (None, True):
        with pytest.raises(PickleRefused, match=r"object.*weights_only=False"):
            plugin.load_checkpoint(tmp_path / "1.ckpt", weights_only=weights_only)
    assert isinstance(
        plugin.load_checkpoint(tmp_path / "1.ckpt", weights_only=False)["object"], Custom
    )
    plugin.teardown()
    trusting = TwoBufferCheckpointIO(allow_pickle=True)
    assert isinstance(trusting.load_checkpoint(tmp_path / "1.ckpt")["object"], Custom)
    with pytest.raises(PickleRefused):
        trusting.load_checkpoint(tmp_path / "1.ckpt", weights_only=True)


@pytest.mark.parametrize(
    "map_location",
    [None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, _where: storage],
)
def test_map_location_is_taken_in_all_its_forms(tmp_path: Path, map_location: Any) -> None:
    plugin = TwoBufferCheckpointIO()
    tied = torch.ones(3)
    plugin.save_checkpoint({"a": tied, "b": [tied], "global_step": 1}, tmp_path / "1.ckpt")
    loaded = plugin.load_checkpoint(tmp_path / "1.ckpt", map_location=map_location)
    assert loaded["a"] is loaded["b"][0] or loaded["a"].data_ptr() == loaded["b"][0].data_ptr()
    plugin.teardown()


def test_map_location_moves_tensors(tmp_path: Path) -> None:
    plugin = TwoBufferCheckpointIO()
    plugin.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    loaded = plugin.load_checkpoint(tmp_path / "1.ckpt", map_location="meta")
    assert loaded["state_dict"]["w"].is_meta
    plugin.teardown()


def test_a_damaged_checkpoint_is_an_error_that_names_file_and_tensor(tmp_path: Path) -> None:
    plugin = TwoBufferCheckpointIO()
    plugin.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    plugin.teardown()
    shard = next((tmp_path / "1.ckpt").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    with pytest.raises(IntegrityError, match=r"safetensors.*state_dict\.w"):
        plugin.load_checkpoint(tmp_path / "1.ckpt")


def test_an_ordinary_last_checkpoint_of_an_earlier_run_stays_an_ordinary_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for epochs, plugins, ckpt_path in ((1, None, None), (2, [TwoBufferCheckpointIO()], "last")):
        files = checkpoints_of(tmp_path, save_last=True)
        trainer = trainer_for(tmp_path, files, plugins=plugins, max_epochs=epochs)
        trainer.fit(Net(), loader(), loader(shuffle=False), ckpt_path=ckpt_path)
    last = tmp_path / "files" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 16
    assert "is an ordinary file and stays one" in caplog.text
