"""Runs a function on several real processes with a gloo group between them.

The processes are forked from one server that has imported torch once: a rank starts in
milliseconds, and is as real a process as any other.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ports import free_port

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.distributed.preload"])


def run_ranks(
    folder: Path, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120
) -> list[Any]:
    """Call `function(rank, *args)` on every rank; each rank's result, or its exception."""
    folder.mkdir(exist_ok=True)
    jobs = []
    port = free_port()
    for rank in range(world_size):
        job = folder / f"rank-{rank}.job"
        job.write_bytes(pickle.dumps((function.__module__, function.__name__, args)))
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        process = _SERVER.Process(target=_main, args=(str(job), env, os.getcwd(), sys.path))
        process.start()
        jobs.append((job, process))
    deadline = time.monotonic() + timeout_s
    for _, process in jobs:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for _, process in jobs if process.exitcode is None]
    for process in late:
        process.kill()
        process.join()
    return [_result(job, process.exitcode) for job, process in jobs]


def _result(job: Path, code: int | None) -> Any:
    result = job.with_suffix(".result")
    if not result.exists():
        return RuntimeError(f"exit code {code}: {job.with_suffix('.log').read_text()[-2000:]}")
    return pickle.loads(result.read_bytes())


def _main(job: str, env: dict[str, str], folder: str, search: list[str]) -> None:
    import importlib

    import torch
    import torch.distributed as dist

    with Path(job).with_suffix(".log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    sys.path[:] = search
    os.chdir(folder)
    os.environ.update(env)
    torch.set_num_threads(1)
    module, name, args = pickle.loads(Path(job).read_bytes())
    dist.init_process_group("gloo")
    try:
        result = getattr(importlib.import_module(module), name)(dist.get_rank(), *args)
    except Exception as error:
        traceback.print_exc()
        result = error
    Path(job).with_suffix(".result").write_bytes(pickle.dumps(result))
    if isinstance(result, Exception):
        os._exit(1)  # its peers may wait in a collective; leaving tidily would wait for them
    dist.destroy_process_group()
