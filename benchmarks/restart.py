"""Seconds from a kill to the first step done again, with what is lost taken away before.

Starts a training process, kills it with SIGKILL, and starts it again: with all tiers there, without
the cache, without the primary. Knows processes and folders. Knows nothing of what they save.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATIENCE_S = 300.0


def restarts(folder: Path, label: str, size: int, server: dict[str, Any]) -> dict[str, Any]:
    """Per tier what a restart took; `folder` is where the sink looks for the files of `label`."""
    primary, cache, archived = (folder / name for name in ("primary", "cache", "archived"))
    # Where a server keeps nothing, what it serves lies here, also once the primary is lost.
    primary.mkdir(parents=True)
    archived.symlink_to(primary)
    job = {
        "primary": str(primary),
        "cache": str(cache),
        "archive": f"s3://{server['bucket']}/{label}/archived",
        "options": server["options"],
        "bytes": size,
    }
    writers: set[int] = set()
    with _trainer(job, folder / "first.log") as trainer:
        _line(trainer, "kept")
        writers |= _children(trainer)
        killed = _kill(trainer)
    found: dict[str, Any] = {}
    for tier in ("cache", "primary", "archive"):
        if tier != "cache":
            shutil.rmtree(cache)
        if tier == "archive":
            archived.unlink()
            primary.rename(archived)
        with _trainer(job, folder / f"{tier}.log") as trainer:
            line = _line(trainer, "step")
            place = {"cache": job["cache"], "primary": job["primary"], "archive": job["archive"]}
            if not str(line["source"]).startswith(place[tier]):
                raise RuntimeError(f"resumed from {line['source']} instead of the {tier}")
            found[tier] = {
                "seconds": line["at"] - killed,
                **{name: line[name] for name in ("step", "start_s", "resume_s", "step_s")},
            }
            writers |= _children(trainer)
            killed = _kill(trainer)
    _await_end(writers)  # their archive is about to be stopped
    return found


@contextmanager
def _trainer(job: dict[str, Any], log: Path) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(HERE / "restart_job.py"), json.dumps(job)]
    environment = {**os.environ, "PYTHONPATH": path}
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    try:
        yield process
    except RuntimeError as error:
        said = log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"{error}: {said[-1] if said else 'it said nothing'}") from None
    finally:
        process.kill()
        process.wait()


def _line(process: subprocess.Popen[str], wanted: str) -> dict[str, Any]:
    """The next line of a training process that has a field."""
    assert process.stdout is not None
    deadline = time.monotonic() + PATIENCE_S
    for text in process.stdout:
        if wanted in (line := json.loads(text)):
            return line
        if time.monotonic() > deadline:
            break
    raise RuntimeError(f"the training process did not come to {wanted!r}")


def _children(process: subprocess.Popen[str]) -> set[int]:
    """The writer of a training process, which outlives it."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def _await_end(pids: set[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left} went on for {PATIENCE_S:.0f} s after the kills")
        time.sleep(0.05)


def _kill(process: subprocess.Popen[str]) -> float:
    """SIGKILL; when it was."""
    now = time.time()
    process.send_signal(signal.SIGKILL)
    process.wait()
    return now
