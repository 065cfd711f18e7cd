"""Ranks that torchrun starts again go on at one step, on as many processes as it starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.examples.running import EXAMPLES, output, start, until
from torch_ckpt import load_generation

STEPS, EVERY, BEFORE = 12, 2, 8
"""`BEFORE`: how many steps are done before the number of ranks changes."""
TOLERANCE = 1e-3
BEGIN = re.compile(r"^rank (\d+) of (\d+), process (\d+), at step (\d+)$", re.MULTILINE)


class Torchrun:
    """The example on some ranks."""

    def __init__(self, root: Path, ranks: int, steps: int, restarts: int = 0) -> None:
        self.log = root.with_name(f"{root.name}-{ranks}.txt")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        command += [str(EXAMPLES / "fsdp_elastic.py"), f"--root={root}", f"--steps={steps}"]
        env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--save-every={EVERY}"],
                stdout=log,
                stderr=log,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **env},
            )

    def begun(self) -> list[tuple[int, ...]]:
        """Rank, world size, process and first step of every rank that has begun."""
        return [tuple(map(int, line.groups())) for line in BEGIN.finditer(self.log.read_text())]

    def saved(self, step: int) -> bool:
        """Whether it has saved a step, or ended."""
        assert self.process.poll() is None, self.log.read_text()
        return f"step {step}  loss" in self.log.read_text()

    def end(self) -> None:
        code = self.process.wait(timeout=240)
        assert code == 0, self.log.read_text()


def losses(root: Path) -> torch.Tensor:
    return torch.tensor(load_generation(root)["place"]["losses"], dtype=torch.float64)


def writers_of(root: Path) -> list[int]:
    mine = [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"]]
    return [one.pid for one in mine if any(str(root) in word for word in one.info["cmdline"])]


@pytest.fixture
def torchrun() -> Iterator[Callable[..., Torchrun]]:
    """Starts jobs; nothing of them is left, however the test ends."""
    jobs: list[Torchrun] = []

    def begin(*args: Any, **options: Any) -> Torchrun:
        jobs.append(Torchrun(*args, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.terminate()  # torchrun takes its ranks along
        job.process.wait()


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_killed_rank_costs_a_restart_and_another_number_of_ranks_only_rounding(
    torchrun: Callable[..., Torchrun], tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    job = torchrun(killed, 2, BEFORE, restarts=1)
    until(lambda: job.saved(2 * EVERY))
    victim = next(process for rank, _, process, _ in job.begun() if rank == 1)
    os.kill(victim, signal.SIGKILL)
    beside = torchrun(whole, 2, STEPS)
    job.end()
    beside.end()
    first, again = job.begun()[:2], job.begun()[2:]
    assert sorted(rank for rank, _, _, _ in again) == [0, 1]
    assert {at for _, _, _, at in first} == {0}
    (resumed,) = {at for _, _, _, at in again}
    assert resumed in (EVERY, 2 * EVERY, 3 * EVERY), "the newest generation, of all ranks"
    wanted = losses(whole)
    assert len(wanted) == STEPS
    assert torch.equal(losses(killed), wanted[:BEFORE]), "bit for bit on as many ranks"

    more = torchrun(killed, 3, STEPS)
    more.end()
    assert [(size, at) for _, size, _, at in more.begun()] == [(3, BEFORE)] * 3
    found = losses(killed)
    assert torch.equal(found[:BEFORE], wanted[:BEFORE])
    apart = (found - wanted).abs().max().item()
    print(f"greatest difference of a loss on 3 ranks from one on 2: {apart:.1e}")
    assert apart <= TOLERANCE
    until(lambda: not writers_of(tmp_path), timeout_s=30)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_story_ends_with_the_curve_of_the_uninterrupted_run(tmp_path: Path) -> None:
    out, err = output(start("elastic_demo.py", cwd=tmp_path), 0, timeout_s=840)
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"^ +torchrun started all 4 again, at step \d+$", out, re.MULTILINE), out
    for ranks in (2, 3):
        assert re.search(rf"^on {ranks} processes +went on at step \d+", out, re.MULTILINE), out
    assert re.search(r"^steps 1 to \d+ +the same, bit for bit\? yes$", out, re.MULTILINE), out
    assert re.search(r"^steps \d+ to 60 +within 0.001\? yes$", out, re.MULTILINE), out
    assert not (tmp_path / "elastic-demo-run").exists()
    until(lambda: not writers_of(tmp_path), timeout_s=30)


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    _, err = output(start("elastic_demo.py", "--root", "mine", cwd=tmp_path), 2)
    assert err.startswith("elastic_demo: mine was not made by this demo; move it away")
    assert os.listdir(tmp_path) == ["mine"]
