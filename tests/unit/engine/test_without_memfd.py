"""Where shared memory cannot be handed over, a thread writes, and says what that means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_ckpt import load_generation

PROGRAM = """
import errno, logging, os, sys
logging.basicConfig(level=logging.WARNING)
def refuse(*_):
    raise PermissionError(errno.EPERM, "not in this sandbox")
{how}
import torch
from torch_ckpt import Checkpointer, SaveFailed
with Checkpointer(sys.argv[1]) as checkpointer:
    state = {{"t": torch.zeros(1000), "step": 0}}
    assert checkpointer.resume(state) is None
    for step in (1, 2, 3):
        state["t"].fill_(step)
        checkpointer.save(state, step)
    checkpointer.wait()
    assert checkpointer.writer_pid is None
    open(sys.argv[1] + "/step-0000000005", "w").close()
    checkpointer.save(state, 5)
    try:
        checkpointer.wait()
    except SaveFailed:
        print("failed once")
    checkpointer.save(state, 6)
with Checkpointer(sys.argv[1]) as checkpointer:
    print("resumed", checkpointer.resume(state).step)
"""


@pytest.mark.parametrize("how", ["del os.memfd_create", "os.memfd_create = refuse"])
def test_a_thread_saves_fails_and_resumes_like_a_writer(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(how=how), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["failed once", "resumed 6"]
    assert "a thread writes snapshots" in done.stderr
    assert torch.equal(load_generation(tmp_path, 3)["t"], torch.full((1000,), 3.0))


TIERED = """
import os, sys
del os.memfd_create
from pathlib import Path
from tests.unit.engine.tiered import resume, state_of, steps_in, tiers
root = Path(sys.argv[1])
with tiers(root, slabs=1) as checkpointer:
    for step in (1, 2):
        checkpointer.save(state_of(step), step).wait("archived", 60)
    assert checkpointer.writer_pid is None
print([steps_in(root / name) for name in ("root", "cache", "archive")], resume(root))
"""


def test_a_thread_serves_the_tiers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TIERED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[2], [2], [1, 2]] (2, 'cache')"
