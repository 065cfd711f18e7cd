"""One rank whose storage does not get on costs the others a bounded wait, never the job."""

from __future__ import annotations

from pathlib import Path

from tests.distributed import stalled_job
from tests.distributed.ranks import run_ranks


def test_a_rank_without_a_free_slab_leaves_the_save_out_on_all_ranks_and_training_goes_on(
    tmp_path: Path,
) -> None:
    results = run_ranks(
        tmp_path / "ranks",
        stalled_job.save_beside_a_stopped_writer,
        2,
        str(tmp_path / "run"),
        timeout_s=120,
    )
    for result in results:
        assert result["skipped"] == "skipped"
        assert result["blocked"] < stalled_job.AGREE_S, "before the peers lose patience"
        assert result["steps"] == [5, 3, 2, 1]
