"""Tensors of any shape under any sharding, and which elements of them each rank must have.

What a rank holds is worked out here by cutting the whole tensor, without asking DTensor, so that
it can be the judge of what is saved and loaded. Knows meshes and placements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ckpt import Checkpointer


@dataclass(frozen=True)
class Layout:
    """How a tensor is shared out: over which ranks, and along which of its dimensions."""

    ranks: tuple[int, ...]
    mesh: tuple[int, ...]
    dims: tuple[int | None, ...]
    """For every dimension of the mesh the dimension of the tensor that it cuts, if any."""
    strided: bool = False
    """Cut as FSDP over TP does: along one dimension, the last dimension of the mesh first."""


@dataclass(frozen=True)
class Drawn:
    """A tensor and its layouts; None is a plain tensor, the same on all ranks."""

    seed: int
    shape: tuple[int, ...]
    dtype: str
    saved: Layout | None
    loaded: tuple[Layout | None, ...]
    """By world size less one."""


def whole(drawn: Drawn) -> torch.Tensor:
    """The unsharded tensor: any bits, also those of NaNs."""
    dtype = getattr(torch, drawn.dtype)
    generator = torch.Generator().manual_seed(drawn.seed)
    count = math.prod(drawn.shape) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype).reshape(drawn.shape)


def local(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """What of a whole tensor a rank holds."""
    if rank not in layout.ranks:
        return tensor.new_empty((0,))
    position = layout.ranks.index(rank)
    coordinates: list[int] = []
    for size in reversed(layout.mesh):
        coordinates.insert(0, position % size)
        position //= size
    cuts = list(zip(layout.dims, layout.mesh, coordinates, strict=True))
    for dim, size, at in reversed(cuts) if layout.strided else cuts:
        if dim is not None:
            length = -(-tensor.shape[dim] // size)
            start = min(at * length, tensor.shape[dim])
            tensor = tensor.narrow(dim, start, min(length, tensor.shape[dim] - start))
    return tensor


@lru_cache
def _mesh(ranks: tuple[int, ...], shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(shape))


def live(full: torch.Tensor, layout: Layout | None, rank: int) -> torch.Tensor:
    """A tensor or DTensor that holds its part of `full`."""
    if layout is None:
        return full.clone()
    mesh = _mesh(layout.ranks, layout.mesh)
    placements: list[Any] = [Replicate() if dim is None else Shard(dim) for dim in layout.dims]
    if layout.strided:
        first = layout.dims[0]
        assert first is not None
        placements[0] = _StridedShard(first, split_factor=layout.mesh[-1])
    mine = local(full, layout, rank).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        mine, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def bits(tensor: torch.Tensor) -> tuple[object, ...]:
    """Everything that makes two tensors the same."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), data.numpy().tobytes()


def save_all(rank: int, root: str, examples: Sequence[Sequence[Drawn]]) -> None:
    """One run in which every example is a step, so that every save has another shape."""
    with Checkpointer(root, keep=None, agree_timeout_s=30) as checkpointer:
        for step, example in enumerate(examples):
            state = {
                f"t{number}": live(whole(drawn), drawn.saved, rank)
                for number, drawn in enumerate(example)
            }
            checkpointer.save(state, step, block="committed")
        dist.barrier()


def load_all(rank: int, roots: Sequence[str], saved: Sequence[Any]) -> list[str]:
    """Load every example of every run under this world's layouts; what differs."""
    world, odd = dist.get_world_size(), []
    for root, examples in zip(roots, saved, strict=True):
        with Checkpointer(root, keep=None, agree_timeout_s=30) as checkpointer:
            for step, example in enumerate(examples):
                state, wanted = {}, {}
                for number, drawn in enumerate(example):
                    full, layout = whole(drawn), drawn.loaded[world - 1]
                    garbage = whole(replace(drawn, seed=drawn.seed + 1))
                    state[f"t{number}"] = live(garbage, layout, rank)
                    part = full if layout is None else local(full, layout, rank)
                    wanted[f"t{number}"] = bits(part)
                checkpointer.load(state, step)
                for number, drawn in enumerate(example):
                    tensor = state[f"t{number}"]
                    mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    if bits(mine) != wanted[f"t{number}"]:
                        odd.append(f"{root} step {step}: {drawn}")
    return odd
