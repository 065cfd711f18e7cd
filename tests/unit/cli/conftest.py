"""A run with a few real generations, and the command line run in this process or another one."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt import Checkpointer
from torch_ckpt.cli.main import run

PROGRAM = [sys.executable, "-m", "torch_ckpt.cli.main"]


@dataclass
class Done:
    """What one command line did."""

    code: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command line in this process, as the entry point does; output is no terminal."""

    def call(*arguments: object) -> Done:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return call


def state_at(step: int) -> dict[str, Any]:
    """A state with tied weights, a dtype that safetensors lacks, an array and plain objects."""
    torch.manual_seed(step)
    weight = torch.randn(64, 32)
    return {
        "model": {"weight": weight, "bias": torch.randn(8), "head": weight},
        "z": torch.randn(3, dtype=torch.complex64),
        "array": torch.arange(5).numpy(),
        "empty": torch.empty(0, 3),
        "step": step,
        "rate": float("inf"),
        "shape": (1, "two"),
        "nothing": {},
    }


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli") / "run"
    with Checkpointer(root, keep=None, distributed=False, framework={"lightning": "2.6"}) as run:
        for step, loss in ((1, 0.9), (2, 0.5), (3, 0.7)):
            run.save(state_at(step), step, metrics={"val_loss": loss}, block="committed")
        run.save(
            state_at(4),
            4,
            metrics={"acc": float("nan")},
            tags=["permanent"],
            folder="epoch=0-step=4.ckpt",
            block="committed",
        )
    return root


@pytest.fixture
def root(_made: Path, tmp_path: Path) -> Path:
    """A run with steps 1 to 4; the last one is permanent and has a folder named by Lightning."""
    return Path(shutil.copytree(_made, tmp_path / "run"))


def shard_in(folder: Path) -> Path:
    """The one shard of a generation."""
    (shard,) = folder.glob("*.safetensors")
    return shard


def flip(path: Path, offset: int = -1) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def on_terminal(*arguments: object, answer: str = "", columns: int = 60) -> tuple[int, str]:
    """Run a command line on a terminal of its own; its code and what it showed, without colours."""
    controller, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    child = subprocess.Popen(
        [*PROGRAM, *map(str, arguments)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=env,
        close_fds=True,
    )
    os.close(terminal)
    if answer:
        os.write(controller, answer.encode())
    shown = bytearray()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([controller], [], [], 0.1)[0]:
            try:
                data = os.read(controller, 65536)
            except OSError:  # the terminal's other side is closed
                break
            if not data:
                break
            shown += data
    code = child.wait(timeout=60)
    os.close(controller)
    return code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
