"""A model that FSDP2 shards under Accelerate is saved by every rank and comes back on each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate.job import Done, committed, run

JOB = {"main": "tests.accelerate.fsdp_job:main", "save_at": [5]}


def finish(job: dict[str, Any], world_size: int = 2) -> list[Done]:
    done = run(job, world_size)
    assert [one.code for one in done] == [0] * world_size, "\n".join(one.log for one in done)
    return done


@pytest.mark.slow
def test_killed_on_two_ranks_a_sharded_model_goes_on_bit_for_bit(tmp_path: Path) -> None:
    job = {**JOB, "folder": str(tmp_path)}
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
