"""A trainer with an archive in a bucket, which does what its test asks for.

The state of a step is a pure function of the step; its shard is large enough for two parts of a
multipart upload. Knows the public surface of the engine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from tests.crash.programs import Logged, differences, state_of
from tests.crash.run import Inside
from torch_ckpt import Checkpointer
from torch_ckpt.errors import CkptError
from torch_ckpt.generations.retention import KeepLast

torch.set_num_threads(1)

SIZE = 4_500_000


def train(inside: Inside, root: str, options: dict[str, Any]) -> None:
    """Resume, tell how that went, then do one wish after the other until there is none."""
    log = Logged()
    size = options.pop("size", SIZE)
    log.setLevel(options.pop("log_level", "WARNING"))
    began = time.monotonic()
    saver = Checkpointer(
        root, **{"keep": KeepLast(1), "distributed": False, "fence": "manual", **options}
    )
    trained = _Trained(saver, size, log)
    inside.say({**trained.resume(), "took_s": time.monotonic() - began})
    while (wish := inside.hear()) is not None:
        name, *arguments = wish if isinstance(wish, tuple) else (wish,)
        inside.say({**getattr(trained, name)(*arguments), "writer": saver.writer_pid})
    try:
        saver.close()
    except CkptError as error:
        log.lines.append(f"{type(error).__name__}: {error}")
    inside.say({"log": log.lines})


class _Trained:
    """What a test may ask for, each with an answer."""

    def __init__(self, saver: Checkpointer, size: int, log: Logged) -> None:
        self._saver, self._size, self._log = saver, size, log
        self._saves: dict[int, Any] = {}

    def resume(self) -> dict[str, Any]:
        state = state_of(0, self._size)
        answer: dict[str, Any] = {"step": None, "url": None, "differs": [], "error": None}
        try:
            found = self._saver.resume(state)
        except CkptError as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        else:
            if found is not None:
                wanted = state_of(found.step, self._size)
                answer |= {"step": found.step, "url": found.url}
                answer["differs"] = differences(state, wanted)
        return {**answer, "writer": self._saver.writer_pid, "log": self._log.lines[:]}

    def save(self, step: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
        began = time.monotonic()
        pending = self._saver.save(state_of(step, self._size), step, **(options or {}))
        self._saves[step] = pending
        error = None
        try:
            pending.wait("committed")
        except CkptError as failure:
            error = f"{type(failure).__name__}: {failure}"
        return {"state": pending.state, "error": error, "took_s": time.monotonic() - began}

    def archived(self, step: int, timeout_s: float = 60.0) -> dict[str, Any]:
        began = time.monotonic()
        error = None
        try:
            self._saves[step].wait("archived", timeout_s)
        except (CkptError, TimeoutError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        return {"error": error, "took_s": time.monotonic() - began}

    def state(self) -> dict[str, Any]:
        """Memory of the writer that is its own, the lines so far, what waits."""
        return {
            "bytes": private_bytes(self._saver.writer_pid or os.getpid()),
            "log": self._log.lines[:],
            "lag": self._saver.archive_lag,
        }

    def close(self) -> dict[str, Any]:
        began = time.monotonic()
        error = None
        try:
            self._saver.close()
        except CkptError as failure:
            error = f"{type(failure).__name__}: {failure}"
        return {"error": error, "took_s": time.monotonic() - began}


def private_bytes(pid: int) -> int:
    """Memory of a process that no other one shares: without slabs."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if "Private" in line[:8])
