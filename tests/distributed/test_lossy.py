"""What is lossy names a generation that is whole on every rank, also if one rank was late."""

from __future__ import annotations

from pathlib import Path

from tests import chains
from tests.distributed import lossy_job as job
from tests.distributed.ranks import run_ranks


def test_a_rank_that_was_late_still_starts_anew_with_the_others(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert run_ranks(tmp_path / "jobs", job.train, 2, str(root)) == [None, None]
    found = chains.by_step(root)
    raw = {step for step, one in found.items() if chains.codecs(root, one, 1) == {"raw"}}
    # It may take up step 4 before step 3 is committed.
    assert raw | {4} == {1, 4, 5, 6, 11}, "of rank 1, which was late at step 5"
    whole = [step for step, one in found.items() if not one.manifest.bases]
    assert sorted(whole) == [1, 6, 11]
    for step, one in found.items():
        assert ("lossy" in one.tags) == (step not in whole)
        assert set(one.manifest.bases) <= set(whole), "else old ones would be needed for ever"
    chains.assert_sound(root)
