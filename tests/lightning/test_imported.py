"""A stock Lightning run goes on under this package, from its own checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint

from lightning_ckpt import CheckpointCallback, TwoBufferCheckpointIO
from tests.lightning.job import Net, loader, outcome, trainer_for
from torch_ckpt import load_generation
from torch_ckpt.cli.main import run

NAME = "epoch=1-step=16.ckpt"


def go_on(trainer: Any, ckpt_path: str | None) -> dict[str, Any]:
    pl.seed_everything(5)  # what a stock checkpoint does not hold
    trainer.fit(Net(), loader(), ckpt_path=ckpt_path)
    return outcome(trainer)


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """A checkpoint of two epochs, as stock Lightning writes it."""
    files = ModelCheckpoint(tmp_path / "stock", filename="{epoch}-{step}", save_top_k=-1)
    pl.seed_everything(1)
    trainer_for(tmp_path, files, max_epochs=2).fit(Net(), loader())
    assert (tmp_path / "stock" / NAME).is_file()
    return tmp_path / "stock" / NAME


@pytest.fixture
def expected(stock: Path, tmp_path: Path) -> dict[str, Any]:
    """How stock Lightning goes on from there."""
    trainer = trainer_for(tmp_path, enable_checkpointing=False, max_epochs=4)
    found = go_on(trainer, str(stock))
    assert found["step"] == 32
    return found


def test_the_callback_goes_on_from_an_import_as_stock_lightning_does(
    stock: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    assert run(["import", str(stock), str(root)]) == 0
    callback = CheckpointCallback(root)
    assert callback.ckpt_path.endswith("step-0000000016/manifest.json")
    assert go_on(trainer_for(tmp_path, callback, max_epochs=4), None) == expected


def test_the_plugin_goes_on_from_an_import_as_stock_lightning_does(
    stock: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    assert run(["import", str(stock), str(root), "--folder", NAME]) == 0
    plugin = TwoBufferCheckpointIO()
    trainer = trainer_for(tmp_path, plugins=[plugin], enable_checkpointing=False, max_epochs=4)
    assert go_on(trainer, str(root / NAME)) == expected


def test_an_imported_model_is_loaded_without_a_trainer(stock: Path, tmp_path: Path) -> None:
    assert run(["import", str(stock), str(tmp_path / "run")]) == 0
    out = tmp_path / "out.ckpt"
    assert run(["export", str(tmp_path / "run"), str(out), "--to", "lightning"]) == 0
    one, other = (torch.load(path, weights_only=True) for path in (stock, out))
    assert list(one) == list(other)
    model = Net.load_from_checkpoint(out)
    assert all(
        torch.equal(tensor.cpu(), one["state_dict"][name])
        for name, tensor in model.state_dict().items()
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_is_what_lightning_itself_would_consolidate(
    stock: Path, tmp_path: Path
) -> None:
    # The layout of FSDPStrategy and ModelParallelStrategy: DCP, and the rest beside it.
    rest = torch.load(stock, weights_only=True)
    parts = {"model": rest.pop("state_dict"), "optimizer_0": rest.pop("optimizer_states")[0]}
    source = tmp_path / "sharded" / NAME
    dcp.save(parts, checkpoint_id=source, no_dist=True)
    torch.save(rest, source / "meta.pt")

    assert run(["import", str(source), str(tmp_path / "run")]) == 0

    loaded = load_generation(tmp_path / "run", 16)
    theirs = _format_checkpoint(_load_distributed_checkpoint(source))
    assert loaded.keys() == theirs.keys()
    assert loaded["global_step"] == 16
    for name, tensor in theirs["state_dict"].items():
        assert torch.equal(loaded["state_dict"][name], tensor)
    slots, their_slots = loaded["optimizer_states"][0], theirs["optimizer_states"][0]
    assert slots["param_groups"][0]["lr"] == their_slots["param_groups"][0]["lr"]
    assert sorted(map(str, slots["state"])) == sorted(map(str, their_slots["state"]))
