"""Ranks copy moments as codes all together, or none of them does."""

from __future__ import annotations

from pathlib import Path

from tests import chains
from tests.distributed import quantising_job as job
from tests.distributed.ranks import run_ranks
from tests.moments import Run, assert_exact, assert_read


def test_all_ranks_copy_codes_or_none_does(tmp_path: Path) -> None:
    root, steps = tmp_path / "run", list(range(1, 8))
    done = run_ranks(tmp_path / "jobs", job.train, 2, str(root), steps, 5)
    # Rank 1 has seen no generation without loss at step 2, and is not sure at step 5.
    codes = [step in (3, 4, 6, 7) for step in steps]
    assert done == [codes, codes]
    run = Run(shape=job.SHAPE)
    for step in steps:
        run.step(step)
        run.saved[step] = {name: one.clone() for name, one in run.moments.items()}
    assert_exact(root, run, 1)
    for step in steps[1:]:
        assert_read(root, run, step)
    found = chains.by_step(root)
    assert [step for step in steps if "lossy" in found[step].tags] == steps[1:]
    chains.assert_sound(root)
