"""Jobs in processes of their own: one, or one a rank as torchrun would start them.

They are forked from a server that has imported everything.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port

LIMIT_S = 120.0
"""No job takes a tenth of it on a machine that has nothing else to do."""


@dataclass(frozen=True)
class Done:
    """What became of one process of a job; an end by signal n is code -n."""

    code: int
    lines: list[dict[str, Any]]
    """What it said, a JSON document a line."""
    log: str

    def steps(self, what: str = "step") -> list[int]:
        """The steps it said."""
        return [line["step"] for line in self.lines if line["what"] == what]


class Running:
    """One process of a job: `module:function` is called with the job.

    Its `folder` gets what the process writes to its standard streams.
    """

    def __init__(self, main: str, preload: str, job: dict[str, Any], **env: str) -> None:
        folder = Path(job["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._log = (folder / f"{uuid.uuid4().hex}.{end}" for end in ("out", "log"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([preload])
        arguments = (main, job, str(self._out), str(self._log), env)
        self.process = context.Process(target=_redirected, args=arguments)
        self.process.start()

    def wait(self, timeout_s: float = LIMIT_S) -> Done:
        """How it ended."""
        self.process.join(timeout_s)
        log = self._log.read_text()
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still running after {timeout_s:g} s:\n{log[-6000:]}")
        lines = [json.loads(line) for line in self._out.read_text().splitlines()]
        return Done(self.process.exitcode, lines, log)


def environments(world_size: int) -> list[dict[str, str]]:
    """What torchrun would set, for each rank."""
    port = free_port()
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "test",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank in range(world_size)
    ]


def check_codes(done: list[Done], code: int) -> None:
    """Every rank ended so. If one did not, what all of them said: the others may know why."""
    logs = "\n".join(
        f"── rank {rank}: {one.code}\n{one.log[-4000:]}" for rank, one in enumerate(done)
    )
    assert all(one.code == code for one in done), logs


def _redirected(main: str, job: dict[str, Any], out: str, log: str, env: dict[str, str]) -> None:
    for path, descriptor in ((out, 1), (log, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    faulthandler.dump_traceback_later(LIMIT_S - 10)  # of one that hangs, the log says where
    os.environ.update(env)
    module, _, name = main.partition(":")
    getattr(importlib.import_module(module), name)(job)
    sys.stdout.flush()
