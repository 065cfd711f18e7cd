"""Optimizers of sharded models go on exactly where they were, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import optimizers_job as job
from tests.distributed.ranks import run_ranks


def check(folder: Path, saved: int, loaded: int) -> None:
    root = folder / "runs"
    root.mkdir()
    steps = {kind: 0 if kind == "partial" else 2 for kind in job.KINDS}
    results = run_ranks(folder / "saved", job.save_kinds, saved, str(root), steps)
    assert results == [None] * saved, results
    for found in run_ranks(folder / "loaded", job.load_kinds, loaded, str(root), steps):
        assert isinstance(found, dict), found
        assert {how: odd for how, odd in found.items() if odd} == {}


def test_any_optimizer_goes_on_before_and_after_its_first_step_on_more_ranks(
    tmp_path: Path,
) -> None:
    check(tmp_path, 2, 3)


@pytest.mark.slow
def test_any_optimizer_goes_on_before_and_after_its_first_step_on_fewer_ranks(
    tmp_path: Path,
) -> None:
    check(tmp_path, 3, 2)


def test_what_get_state_dict_hands_out_is_saved_and_filled_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert run_ranks(tmp_path / "saved", job.save_dicts, 2, str(root)) == [None] * 2
    assert run_ranks(tmp_path / "loaded", job.load_dicts, 3, str(root)) == [[]] * 3
