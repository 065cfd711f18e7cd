"""Starts the examples as a user would, in processes of their own, and waits for what they do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def start(script: str, *arguments: object, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """One example in a process; one thread, since the tests share few cores."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, **streams)


def output(process: subprocess.Popen[str], code: int, timeout_s: float = 240) -> tuple[str, str]:
    """What it printed until it ended with that code."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout_s:g} s:\n{out}\n{err}") from None
    assert process.returncode == code, f"exit code {process.returncode}:\n{out}\n{err}"
    return out, err


def until(condition: Callable[[], object], timeout_s: float = 120) -> None:
    """Wait for something that a process does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.02)
