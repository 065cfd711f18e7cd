"""Saves and the collectives of training never meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import busy_job
from tests.distributed.ranks import run_ranks


@pytest.mark.parametrize(
    "count", [60, pytest.param(1000, marks=(pytest.mark.sweep, pytest.mark.timeout(1800)))]
)
def test_collectives_of_training_run_all_the_time_during_many_saves(
    tmp_path: Path, count: int
) -> None:
    root = str(tmp_path / "run")
    for result in run_ranks(
        tmp_path / "ranks", busy_job.save_often, 2, root, count, timeout_s=200 + count
    ):
        assert result == {"odd": [], "steps": [count - 1, count - 2]}
