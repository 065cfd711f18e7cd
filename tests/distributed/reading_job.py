"""What ranks read of a state that was saved under another sharding, counted where it is read.

Knows meshes and the local store. Knows nothing of files' formats.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_ckpt import Checkpointer
from torch_ckpt.generations.tiers import Tier
from torch_ckpt.reach import Reach
from torch_ckpt.storage.local import LocalStore

SHAPE = (3072, 2048, 4)
"""Of int32: 96 MiB in twelve blocks where it is whole."""
BYTES = 3072 * 2048 * 4 * 4
Sharding = tuple[int | None, int]
"""Along which dimension, and over how many copies of the whole."""


class Counting(LocalStore):
    """Counts the bytes of shards that are read."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.bytes, self._lock = 0, threading.Lock()

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        count = super().read_into(name, offset, target)
        with self._lock:
            self.bytes += count
        return count


def _whole() -> torch.Tensor:
    return torch.arange(3072 * 2048 * 4, dtype=torch.int32).reshape(SHAPE)


def _live(sharding: Sharding, *, filled: bool) -> DTensor:
    dim, copies = sharding
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (copies, world // copies))
    place = Replicate() if dim is None else Shard(dim)
    local = _whole()
    if dim is not None:
        shards = world // copies
        local = local.chunk(shards, dim)[dist.get_rank() % shards].contiguous()
    if not filled:
        local = torch.zeros_like(local)
    return DTensor.from_local(local, mesh, [Replicate(), place], run_check=False)


def save(rank: int, root: str, sharding: Sharding) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save({"t": _live(sharding, filled=True)}, 1, block="committed")
        dist.barrier()


def load(rank: int, root: str, shardings: list[Sharding]) -> list[dict[str, Any]]:
    """Under each sharding: bytes read by this rank, and whether they are right."""
    found = []
    with Checkpointer(root) as checkpointer:
        for sharding in shardings:
            store = Counting(str(Path(root)))
            checkpointer._resumer._reach = Reach([Tier(name="primary", store=store)])
            tensor = _live(sharding, filled=False)
            checkpointer.resume({"t": tensor})
            wanted = _live(sharding, filled=True)
            same = torch.equal(tensor.to_local(), wanted.to_local())
            found.append({"bytes": store.bytes, "same": same})
    return found
