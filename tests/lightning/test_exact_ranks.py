"""Two DDP ranks each resume their own random state and their own place in the data.

Run as a module, this file is one rank of the job.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from lightning_ckpt.exact import ExactResume
from tests.lightning.exact_job import Case
from tests.lightning.exact_run import Exact, train

ROOT = Path(__file__).parents[2]

DDP_CASES = {
    "middle": (Case(workers=1), ("batch_end", 11)),
    "last": (Case(validate=True), ("batch_end", 8)),
    "end": (Case(plateau="loss_epoch"), ("epoch_end", 1)),
}


def test_two_ranks_each_resume_their_own_place(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # By its own name a machine may be reached at an address that nothing answers.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "-m", "tests.lightning.test_exact_ranks", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for name in DDP_CASES:
        for rank in ranks:
            whole, before, after = rank[name]
            assert before["lines"] + after["lines"] == whole["lines"], name
            for part in ("weights", "optimizer", "generators"):
                assert after[part] == whole[part], (name, part)
        assert ranks[0][name][0]["lines"] != ranks[1][name][0]["lines"]
        assert ranks[0][name][0]["generators"] != ranks[1][name][0]["generators"]


def ddp_rank(folder: Path) -> None:
    """What one rank of the DDP job does: every case, whole, interrupted and resumed."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(200)  # where it stands, when the test is about to give up
    rank = int(os.environ["RANK"])
    several = {"strategy": "ddp", "devices": 2}
    results: dict[str, list[dict]] = {}
    for name, (case, save) in DDP_CASES.items():
        path = folder / f"{name}.ckpt"
        whole = train(case, folder, seed=5 + rank, **several)
        callback = Exact(path, save, ExactResume())
        before = train(case, folder, seed=5 + rank, callback=callback, **several)
        torch.distributed.barrier()
        callback = Exact(path, None, ExactResume())
        after = train(case, folder, seed=70 + rank, callback=callback, resume=path, **several)
        results[name] = [asdict(item) for item in (whole, before, after)]
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    torch.distributed.barrier()


if __name__ == "__main__":
    ddp_rank(Path(sys.argv[1]))
