"""The callback brings a killed run back, bit for bit, with the same command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.job import committed, run, run_ranks
from tests.running import check_codes


def job_in(folder: Path, name: str = "run", **changed: Any) -> dict[str, Any]:
    """A job of 24 steps that saves every third."""
    return {
        "folder": str(folder / f"{name}-work"),
        "root": str(folder / name),
        "out": str(folder / f"{name}.json"),
        "callback": {"every_n_steps": 3},
        "trainer": {"max_epochs": 3},
        **changed,
    }


def outcome_of(job: dict[str, Any]) -> dict[str, Any]:
    """What a finished job wrote."""
    return json.loads(Path(job["out"]).read_text())


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of a run that nobody killed."""
    job = job_in(tmp_path_factory.mktemp("reference"))
    assert run(job).code == 0
    return outcome_of(job)


@pytest.mark.parametrize("kill_at", [4, 11, 17])
def test_sigkill_costs_no_more_than_one_interval_and_the_result_is_bitwise_the_same(
    tmp_path: Path, uninterrupted: dict[str, Any], kill_at: int
) -> None:
    job = job_in(tmp_path)
    killed = run({**job, "kill_at": kill_at})
    assert killed.code == -9
    again = run({**job, "seed": 7})
    assert again.code == 0, again.log
    assert 0 < kill_at - again.steps("start")[0] <= 3 + 2  # what was staged is committed
    assert outcome_of(job) == uninterrupted


def test_sigterm_saves_the_step_it_came_at_and_exits_with_143(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    job = job_in(tmp_path)
    ended = run({**job, "sigterm_at": 13})
    assert ended.code == 143, ended.log
    saved_at = ended.steps()[-1] + 1
    assert saved_at == 14
    assert committed(job["root"], saved_at)
    again = run({**job, "seed": 7})
    assert again.steps("start") == [saved_at]
    assert outcome_of(job) == uninterrupted


def test_sigterm_in_the_middle_of_accumulated_gradients_loses_none_of_them(tmp_path: Path) -> None:
    trainer = {"max_epochs": 3, "accumulate_grad_batches": 4}
    whole = job_in(tmp_path, "whole", trainer=trainer)
    assert run(whole).code == 0
    job = job_in(tmp_path, trainer=trainer)
    assert run({**job, "sigterm_at": 3}).code == 143  # the first of four batches for step 4
    assert run({**job, "seed": 7}).code == 0
    assert outcome_of(job) == outcome_of(whole)


def test_a_finished_run_that_is_started_again_trains_nothing(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    job = job_in(tmp_path)
    assert run(job).code == 0
    again = run({**job, "seed": 7})
    assert again.code == 0
    assert again.steps() == []
    assert outcome_of(job)["digest"] == uninterrupted["digest"]


# ── two ranks ─────────────────────────────────────────────────────────────────────────────────

DDP = {"max_epochs": 3, "devices": 2, "strategy": "ddp"}


def test_two_ranks_killed_and_started_again_end_bitwise_the_same(tmp_path: Path) -> None:
    whole = job_in(tmp_path, "whole", trainer=DDP)
    check_codes(run_ranks(whole), 0)
    job = job_in(tmp_path, trainer=DDP)
    killed = run_ranks({**job, "kill_at": 7, "after_step": 6})
    check_codes(killed, -9)
    again = run_ranks({**job, "seed": 7})
    check_codes(again, 0)
    assert [rank.steps("start") for rank in again] == [[6], [6]]
    assert outcome_of(job) == outcome_of(whole)


@pytest.mark.parametrize("told", [[0], [1], [0, 1]])
def test_ranks_of_which_some_are_told_to_end_save_one_step_together_and_exit_with_143(
    tmp_path: Path, told: list[int]
) -> None:
    job = job_in(tmp_path, trainer=DDP)
    ended = run_ranks({**job, "sigterm_at": 4, "sigterm_ranks": told})
    check_codes(ended, 143)
    assert committed(job["root"], 5)
    again = run_ranks({**job, "seed": 7, "trainer": {**DDP, "max_steps": 6}})
    check_codes(again, 0)
    assert [rank.steps("start") for rank in again] == [[5], [5]]


def test_another_number_of_ranks_goes_on_where_one_was_and_says_so(tmp_path: Path) -> None:
    job = job_in(tmp_path, trainer={"max_steps": 5})
    assert run(job).code == 0
    done = run_ranks({**job, "trainer": {**DDP, "max_steps": 7}})
    check_codes(done, 0)
    assert [rank.steps("start") for rank in done] == [[5], [5]]
    assert "Saved with world size 1, resumed with 2" in done[0].log


def test_ranks_that_do_not_share_their_folder_are_told_so(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    assert run({**job, "sigterm_at": 2}).code == 143
    apart = {**job, "root": [job["root"], str(tmp_path / "elsewhere")], "trainer": DDP}
    done = run_ranks(apart)
    for rank in done:
        assert rank.code == 1
        assert "use storage that all nodes share" in rank.log
