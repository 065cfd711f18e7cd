"""A sharded job that loses ranks at any stage of a save goes on with another number of ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed import sharded_kills_job as job
from tests.distributed.ranks import run_ranks

Case = tuple[int | None, str, bool]
"""Which rank, None for all; at which stage; whether it is stopped before it is killed."""

FEW: list[Case] = [
    (1, "before staging", False),
    (0, "while copying", False),
    (1, "while writing", True),
    (0, "before the manifest", False),
    (None, "while writing", False),
]
ALL: list[Case] = [
    (victim, stage, stops)
    for victim in (0, 1, None)
    for stage in job.STAGES
    for stops in (False, True)
]


def check(
    folder: Path, saved: int, cases: list[Case], back: list[tuple[int, str]], timeout_s: float
) -> None:
    """`timeout_s` is what ranks wait for each other, more than the machine may make them wait."""
    roots = [str(folder / f"run-{number}") for number in range(len(cases))]
    with ThreadPoolExecutor(5) as pool:  # they mostly wait
        jobs = [
            pool.submit(
                run_ranks, Path(f"{root}-ranks"), job.save_and_fail, saved, root, timeout_s, *case
            )
            for root, case in zip(roots, cases, strict=True)
        ]
    for failed, (victim, _, _) in zip(jobs, cases, strict=True):
        for rank, result in enumerate(failed.result()):
            if victim in (None, rank):
                assert "exit code -9" in str(result), result
            else:
                assert isinstance(result, str), "survivors end by themselves"
    for number, (world, how) in enumerate(back):
        # Writers of killed trainers may take their time before each root is resumed.
        patience_s = 120 + timeout_s * len(cases)
        each = run_ranks(
            folder / f"back-{number}", job.resume_all, world, roots, how, timeout_s=patience_s
        )
        for found in each:
            assert isinstance(found, list), found
            assert [one["differs"] for one in found] == [[]] * len(cases)
            assert [one["set apart"] for one in found] == [[]] * len(cases)
        steps = [[one["step"] for one in found] for found in each]
        assert steps == [steps[0]] * world, "no rank sees another step than its peers"
        for step, (_, stage, _) in zip(steps[0], cases, strict=True):
            assert step == 1 or stage != "before staging"


def test_a_rank_killed_or_stopped_in_a_save_costs_that_save_at_most_and_others_resume(
    tmp_path: Path,
) -> None:
    check(tmp_path, 2, FEW, [(3, "fsdp")], timeout_s=5)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_every_rank_and_stage_killed_or_stopped_and_resumed_by_more_and_fewer(
    tmp_path: Path,
) -> None:
    check(tmp_path, 2, ALL, [(3, "fsdp"), (1, "whole"), (4, "hsdp")], timeout_s=20)
