"""Calls a function on several real processes with a gloo group between them.

The processes are forked from one server that has imported torch once, so a rank starts in
milliseconds and every measurement can have fresh ones. Knows nothing of what they measure.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 300

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "torch.distributed.checkpoint",
        "torch.distributed.device_mesh",
        "torch.distributed.fsdp",
        "torch_ckpt.checkpointer",
    ]
)


class RankFailed(RuntimeError):
    """A rank raised, died or was too slow; the message has its traceback."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """`function(rank, *args)` of every rank, which must be importable, in order of rank.

    Raises:
        RankFailed: one of them did not return; none is left running.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(world_size):
        ours, theirs = _SERVER.Pipe(duplex=False)
        process = _SERVER.Process(
            target=_rank, args=(theirs, function, rank, world_size, port, args)
        )
        process.start()
        theirs.close()
        started.append((process, ours))
    deadline = time.monotonic() + timeout_s
    try:
        return [_result(rank, pipe, deadline) for rank, (_, pipe) in enumerate(started)]
    finally:
        for process, pipe in started:
            pipe.close()
            process.join(max(0.0, min(10.0, deadline - time.monotonic())))
            process.kill()
            process.join()


def _result(rank: int, pipe: Connection, deadline: float) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise RankFailed(f"rank {rank} said nothing for too long")
    try:
        good, value = pipe.recv()
    except EOFError:
        raise RankFailed(f"rank {rank} died") from None
    if not good:
        raise RankFailed(f"rank {rank}: {value}")
    return value


def _rank(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    try:
        value = function(rank, *args)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)  # its peers may wait in a collective; leaving tidily would wait for them
    pipe.send((True, value))
    dist.destroy_process_group()
