"""What ranks do whose load fails on one of them, in every way.

All return plain values for the tests to judge. Knows the public surface of the engine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
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

VICTIM = 1
_ROWS = 3 << 20
"""Of 8 bytes: three blocks, one for every rank."""


def sharded(value: float, placement: Any = None) -> DTensor:
    """A tensor of several blocks that is the same wherever it is whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = placement or Shard(0)
    rows = _ROWS if placement.is_replicate() else _ROWS // dist.get_world_size()
    local = torch.full((rows, 2), value)
    return DTensor.from_local(local, mesh, [placement], run_check=False)


class Picky:
    """Has a state, and may refuse to take one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.taken = error, None

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.taken = state


def save_two(rank: int, root: str) -> None:
    """Steps 1 and 2."""
    with Checkpointer(root, keep=None) as checkpointer:
        for step in (1, 2):
            state = {"t": sharded(float(step)), "picky": Picky(), "step": step}
            checkpointer.save(state, step, block="committed")
        dist.barrier()


def _other_shape(rank: int) -> dict[str, Any]:
    extra = {"more": torch.zeros(3)} if rank == VICTIM else {}
    return {"t": sharded(0.0), "picky": Picky(), "step": 0, **extra}


def _raising(error: Exception) -> Callable[[int], dict[str, Any]]:
    def make(rank: int) -> dict[str, Any]:
        picky = Picky(error if rank == VICTIM else None)
        return {"t": sharded(0.0, Replicate()), "picky": picky, "step": 0}

    return make


WAYS: dict[str, Callable[[int], dict[str, Any]]] = {
    "structure": _other_shape,
    "load_state_dict": _raising(RuntimeError("not today")),
    "a file of the user's": _raising(FileNotFoundError("gone.txt")),
    "anything": _raising(ZeroDivisionError("by zero")),
}


class Blurred(LocalStore):
    """Storage that shows this process other bytes than there are."""

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        count = super().read_into(name, offset, target)
        if name.endswith(".safetensors") and len(target) > 4096:
            target[100] ^= 1
        return count


class Mute(LocalStore):
    """Storage that fails in a way that is nobody's damage."""

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if name.endswith(".safetensors") and len(target) > 4096:
            raise MemoryError("no room")
        return super().read_into(name, offset, target)


class Stale(LocalStore):
    """Storage that does not show the newest folder yet."""

    def folders(self) -> list[str]:
        return super().folders()[:-1]

    def get(self, name: str, *, limit: int) -> bytes:
        if name.startswith("step-0000000002"):
            raise FileNotFoundError(name)
        return super().get(name, limit=limit)


class Partly(LocalStore):
    """Storage that lacks one shard."""

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if name.startswith("step-0000000002/rank-00002") and name.endswith(".safetensors"):
            raise FileNotFoundError(name)
        return super().read_into(name, offset, target)


VIEWS: dict[str, type[LocalStore]] = {
    "bytes": Blurred,
    "memory": Mute,
    "listing": Stale,
    "a shard": Partly,
}


def _outcome(call: Callable[[], Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        result = call()
        found = {"result": getattr(result, "step", result)}
    except Exception as error:
        found = {"error": str(error), "kind": type(error).__name__}
    return {**found, "took_s": time.monotonic() - began}


def fail(rank: int, root: str) -> dict[str, Any]:
    """Every way in which one rank alone can fail, at the default time-outs; then a load."""
    found: dict[str, Any] = {}
    with Checkpointer(root, keep=None) as checkpointer:
        for how, make in WAYS.items():
            state = make(rank)
            found[how] = _outcome(lambda state=state: checkpointer.resume(state))
        resumer, honest = checkpointer._resumer, checkpointer._store
        for how, kind in VIEWS.items():
            if rank == VICTIM:
                resumer._reach = Reach([Tier(name="primary", store=kind(root))])
            for placement in (Shard(0), Replicate()):
                state = {"t": sharded(0.0, placement), "picky": Picky(), "step": 0}
                found[f"{how}, {placement}"] = _outcome(
                    lambda state=state: checkpointer.resume(state)
                )
            resumer._reach = Reach([Tier(name="primary", store=honest)])
        state = {"t": sharded(0.0), "picky": Picky(), "step": 0}
        found["in the end"] = _outcome(lambda: checkpointer.resume(state))
        found["value"] = state["t"].to_local()[0, 0].item()
    found["tags"] = [p.read_text().count('"damaged"') for p in Path(root).glob("*/manifest.json")]
    return found


class Deadly(LocalStore):
    """Kills its process when the first large block is read."""

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if name.endswith(".safetensors") and len(target) > 4096:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read_into(name, offset, target)


def die_loading(rank: int, root: str) -> dict[str, Any]:
    """One rank is killed while it reads; the others say how they left."""
    checkpointer = Checkpointer(root, keep=None)
    if rank == VICTIM:
        checkpointer._resumer._reach = Reach([Tier(name="primary", store=Deadly(root))])
    state = {"t": sharded(0.0, Replicate()), "picky": Picky(), "step": 0}
    found = _outcome(lambda: checkpointer.resume(state))
    found["again"] = _outcome(lambda: checkpointer.resume(state))
    return found
