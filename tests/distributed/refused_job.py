"""States that ranks must not save, and states that change between saves.

All return plain values for the tests to judge. Knows the public surface of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ckpt import Checkpointer, PerRank


def _tensor(placement: Any, rows: int = 4, dtype: torch.dtype = torch.float32) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.arange(rows * 3, dtype=dtype).reshape(rows, 3) + 100 * dist.get_rank()
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def _holed(rank: int) -> DTensor:
    """Rows that no single box describes: every other one."""
    mesh = DeviceMesh("cpu", torch.arange(2))
    full = torch.arange(24.0).reshape(8, 3)
    rows = [0, 1, 4, 5] if rank == 0 else [2, 3, 6, 7]
    placements = [_StridedShard(0, split_factor=2)]
    return DTensor.from_local(
        full[rows], mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def _tied(rank: int) -> dict[str, Any]:
    one = torch.ones(2)
    return {"a": one, "b": one if rank else torch.ones(2)}


REFUSED: dict[str, Callable[[int], dict[str, Any]]] = {
    "partial": lambda rank: {"sum": _tensor(Partial())},
    "per rank": lambda rank: {"mine": PerRank({"t": _tensor(Shard(0))})},
    "stages": lambda rank: {"model": {f"layers.{rank}.weight": torch.ones(2)}},
    "a key more": lambda rank: {"t": torch.ones(2), **({"extra": torch.ones(3)} if rank else {})},
    "a PerRank more": lambda rank: {"t": torch.ones(2), **({"rng": PerRank(1)} if rank else {})},
    "a dtype": lambda rank: {"t": torch.ones(2, dtype=torch.int32 if rank else torch.int64)},
    "placements": lambda rank: {"t": _tensor(Shard(1 if rank else 0))},
    "other order": lambda rank: dict(
        sorted({"a": torch.ones(1), "b": torch.ones(2)}.items(), reverse=bool(rank))
    ),
    "tied on one": _tied,
    "holed": lambda rank: {"holed": _holed(rank)},
}


def refuse(rank: int, root: str) -> dict[str, Any]:
    """What each of them raises, with saves of a good state between them."""
    found: dict[str, Any] = {}
    with Checkpointer(root, keep=None) as checkpointer:
        for step, (how, make) in enumerate(REFUSED.items()):
            began = time.monotonic()
            try:
                checkpointer.save(make(rank), 2 * step).wait("staged")
                error, kind = "", None
            except Exception as raised:
                error, kind = str(raised), type(raised).__name__
            found[how] = (kind, error, time.monotonic() - began)
            checkpointer.save({"t": torch.ones(2)}, 2 * step + 1)
        checkpointer.wait()
    with Checkpointer(f"{root}-alone-{rank}", distributed=False) as alone:
        try:
            alone.save({"t": _tensor(Shard(0)), "whole": _tensor(Replicate())}, 1)
        except Exception as raised:
            found["alone"] = (type(raised).__name__, str(raised), 0.0)
    dist.barrier()
    return found


CHANGES: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    ("first", lambda: {"t": _tensor(Shard(0))}),
    ("key added", lambda: {"t": _tensor(Shard(0)), "new": _tensor(Shard(1))}),
    ("dtype", lambda: {"t": _tensor(Shard(0), dtype=torch.bfloat16), "new": _tensor(Shard(1))}),
    ("placement", lambda: {"t": _tensor(Shard(1), dtype=torch.bfloat16)}),
    ("shape", lambda: {"t": _tensor(Shard(0), rows=7), "plain": torch.arange(5)}),
    ("nesting", lambda: {"t": {"t": _tensor(Shard(0), rows=7)}, "plain": [torch.arange(5)]}),
    ("empty", lambda: {"t": _tensor(Shard(0), rows=0), "plain": torch.empty(0)}),
    ("tied", lambda: _twice(_tensor(Shard(0)))),
    ("untied", lambda: {"a": _tensor(Shard(0)), "b": _tensor(Shard(0))}),
    ("first again", lambda: {"t": _tensor(Shard(0))}),
]


def _twice(tensor: DTensor) -> dict[str, Any]:
    return {"a": tensor, "b": tensor}


def _blank(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_blank(item) for item in value]
    return torch.zeros_like(value)


def _locals(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [found for item in value.values() for found in _locals(item)]
    if isinstance(value, list):
        return [found for item in value for found in _locals(item)]
    local = value.to_local() if isinstance(value, DTensor) else value
    return [(str(local.dtype), local.tolist())]


def change(rank: int, root: str) -> list[str]:
    """Save states of every shape in a row, load each; what differs."""
    odd = []
    with Checkpointer(root, keep=None) as checkpointer:
        for step, (_, make) in enumerate(CHANGES):
            checkpointer.save(make(), step)
        checkpointer.wait()
        dist.barrier()
        for step, (how, make) in enumerate(CHANGES):
            state = _blank(make()) if how != "tied" else _twice(_blank(make())["a"])
            checkpointer.load(state, step)
            if _locals(state) != _locals(make()):
                odd.append(how)
    return odd
