"""A model that FSDP2 shards under Accelerate is saved by every rank and comes back on each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from accelerate_ckpt import CheckpointPlugin, attach
from tests.accelerate.fsdp_job import Net, digest
from tests.accelerate.job import committed, reset, run
from tests.running import Done

JOB = {"main": "tests.accelerate.fsdp_job:main", "save_at": [5]}


def finish(job: dict[str, Any], world_size: int = 2) -> list[Done]:
    done = run(job, world_size)
    assert [one.code for one in done] == [0] * world_size, "\n".join(one.log for one in done)
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [{}, {"accumulate": 3}, {"accumulate": 3, "sync_each_batch": True}],
    ids=["every batch", "in an accumulation", "in a synchronized accumulation"],
)
def test_killed_on_two_ranks_a_sharded_model_goes_on_bit_for_bit(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    job = {**JOB, **case, "folder": str(tmp_path)}
    finish({**job, "root": str(tmp_path / "whole"), "out": str(tmp_path / "whole.json")})
    cut = {**job, "root": str(tmp_path / "cut")}
    killed = run({**cut, "kill_at": 7}, 2)
    assert [one.code for one in killed] == [-9, -9], killed[0].log
    assert len(committed(cut["root"])) == 1
    again = finish({**cut, "seed": 9, "out": str(tmp_path / "again.json")})
    assert [one.lines[0]["at"] for one in again] == [5, 5]
    for rank in range(2):
        one, other = (
            json.loads((tmp_path / f"{name}.json.{rank}").read_text())
            for name in ("whole", "again")
        )
        assert other["state"] == one["state"]
        assert other["losses"] == one["losses"][5:]


@pytest.mark.slow
def test_what_two_ranks_saved_in_shards_comes_back_whole_on_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = {**JOB, "folder": str(tmp_path), "root": str(tmp_path / "run"), "save_at": [12]}
    finish({**job, "out": str(tmp_path / "end.json")})
    reset()
    accelerator = Accelerator(cpu=True)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    data = DataLoader(TensorDataset(torch.zeros(96, 6), torch.zeros(96)), 4, shuffle=True)
    accelerator.prepare(net, optimizer, data, scheduler)
    with attach(accelerator, CheckpointPlugin(job["root"])) as checkpoints:
        assert checkpoints.resume() is not None
    reset()
    assert "was saved on 2 ranks and is loaded on 1" in caplog.text
    saved = json.loads((tmp_path / "end.json.0").read_text())["state"]
    assert digest([net.state_dict(), optimizer.state_dict()]) == saved
