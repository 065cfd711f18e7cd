"""`torch-ckpt export --to accelerate` writes a folder that stock `load_state` reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.accelerate.test_saves import Run
from torch_ckpt import save_generation
from torch_ckpt.cli.main import run


def test_stock_load_state_reads_what_is_exported(tmp_path: Path) -> None:
    job = Run(tmp_path)
    job.accelerator.register_for_checkpointing(
        torch.optim.lr_scheduler.StepLR(job.optimizer.optimizer, 3)
    )
    for _ in range(2):
        job.step()
        job.accelerator.save_state()
    weight, drawn = job.weight(), torch.rand(3)
    moments = job.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    job.checkpoints.close()
    out = tmp_path / "stock"
    arguments = ["export", str(tmp_path / "checkpoints"), str(out), "--to", "accelerate"]
    assert run(arguments) == 0
    assert run(arguments) != 0  # it is there now
    assert run([*arguments, "--force"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "custom_checkpoint_0.pkl",
        "model.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
    ]
    job = Run(tmp_path / "other")
    job.accelerator.register_for_checkpointing(
        torch.optim.lr_scheduler.StepLR(job.optimizer.optimizer, 3)
    )
    job.checkpoints._stock["load_state"](str(out))
    assert torch.equal(job.weight(), weight)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(job.optimizer.state_dict()["state"][0]["exp_avg"], moments)
    job.checkpoints.close()


def test_what_no_accelerator_saved_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_generation(tmp_path / "run", {"weight": torch.ones(2)}, 1)
    arguments = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "accelerate"]
    assert run(arguments) != 0
    assert "holds no state of an Accelerator" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
