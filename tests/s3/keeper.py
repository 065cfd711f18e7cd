"""Runs one server for a test process, and ends it with its files whatever happens to that process.

Usage: keeper.py JOB, where JOB is JSON: the command, its environment, the pid of the process it
is for, the log and the paths to remove afterwards. Prints the server's pid. Ends when its standard
input does, when its parent is gone, or when the server ends by itself. Only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_LOOK_S = 0.2
_PR_SET_PDEATHSIG = 1


def main() -> None:
    job = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        _keep(job)
    finally:
        for path in map(Path, job["remove"]):
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                path.unlink()


def _keep(job: dict[str, Any]) -> None:
    libc = ctypes.CDLL(None)
    linux = sys.platform == "linux"

    def end_with_keeper() -> None:  # in case the keeper itself is killed; it has one thread only
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    with open(job["log"], "wb") as log:
        server = subprocess.Popen(
            job["command"],
            env=job["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=end_with_keeper if linux else None,  # noqa: PLW1509 - no threads here
        )
    try:
        print(server.pid, flush=True)
        # The pipe alone would not do: a process forked from the parent may hold its other end.
        while server.poll() is None and os.getppid() == job["parent"]:
            if select.select([sys.stdin], [], [], _LOOK_S)[0]:
                break
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
