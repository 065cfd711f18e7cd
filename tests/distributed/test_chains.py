"""Ranks build on what is committed, whoever failed in between, and one rank resumes it all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import chains
from tests.distributed import chain_job as job
from tests.distributed.ranks import run_ranks


def test_after_a_share_that_failed_ranks_build_on_nothing_uncommitted(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert run_ranks(tmp_path / "jobs", job.train, 2, str(root)) == [None, None]
    assert chains.bases(root) == {1: (), 2: (1,), 4: (), 6: (), 7: (6,)}
    newest = chains.by_step(root)[7]
    assert {one.name[:10] for r in (0, 1) for one in chains.part(root, newest, r).borrowed} == {
        "rank-00000",
        "rank-00001",
    }
    chains.assert_sound(root)
    files = [path.name for path in root.glob("step-*/*") if path.name != "manifest.json"]
    assert len(files) == 5 * 4, files  # nothing of the saves that failed
    assert run_ranks(tmp_path / "two", job.resume, 2, str(root)) == [(7, True), (7, True)]
    assert run_ranks(tmp_path / "one", job.resume, 1, str(root)) == [(7, True)]


def test_what_rank_0_alone_calls_permanent_stands_alone_on_all_ranks(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert run_ranks(tmp_path / "jobs", job.tagged, 2, str(root)) == [None, None]
    assert chains.bases(root) == {1: (), 2: (1,), 3: (), 4: (3,)}
    chains.assert_sound(root)


@pytest.mark.slow
def test_a_chain_begins_anew_where_the_number_of_ranks_changes(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for count, steps, found in [
        (2, (1, 2), (None, False)),
        (1, (3, 4), (2, True)),
        (3, (5, 6), (4, True)),
        (2, (), (6, True)),
    ]:
        jobs = tmp_path / f"jobs-{count}-{steps}"
        assert run_ranks(jobs, job.go_on, count, str(root), steps) == [found] * count
    assert chains.bases(root) == {1: (), 2: (1,), 3: (), 4: (3,), 5: (), 6: (5,)}
    chains.assert_sound(root)
