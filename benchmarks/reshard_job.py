"""What a rank does in the resharding benchmark: a state under one sharding, saved and loaded.

Knows both sides, and how to measure one load from within the process that does it. Knows nothing
of rows, repeats or judgement.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from watch import Watch

from torch_ckpt import Checkpointer

Sharding = Literal["whole", "fsdp", "hsdp", "fsdp dim 1"]
Side = Literal["ours", "dcp"]
STEP = 1
MOMENTS = ("model", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How big the model is."""

    layers: int
    width: int
    hidden: int


FULL = Size(layers=5, width=1024, hidden=2048)
"""About 21 M parameters: 0.25 GB with AdamW's two moments."""

QUICK = Size(layers=2, width=64, hidden=128)
"""A smoke test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """One load by one rank."""

    seconds: float
    cpu_s: float
    """Of all its threads; less at the mercy of what else runs on the machine."""

    read_bytes: int
    """What its system calls read from files; bytes from sockets are not among them."""

    memory_bytes: int
    """The most that was resident during the load beyond what was before."""

    wrong: tuple[str, ...]
    """Tensors that are not what was saved."""


def build(size: Size, sharding: Sharding) -> dict[str, dict[str, torch.Tensor]]:
    """A model's parameters and AdamW's moments of them, as FSDP2 holds them."""
    model = nn.Sequential()
    for _ in range(size.layers):
        model.append(nn.Linear(size.width, size.hidden))
        model.append(nn.Linear(size.hidden, size.width))
        model.append(nn.LayerNorm(size.width))
    world = dist.get_world_size()
    if sharding != "whole":
        shape, names = ((world,), ("shards",))
        if sharding == "hsdp":
            shape, names = (2, world // 2), ("copies", "shards")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        # A wrapped layer each, as trainers do.
        for layer in model:
            dim_1 = sharding == "fsdp dim 1" and isinstance(layer, nn.Linear)
            fully_shard(
                layer,
                mesh=mesh,
                shard_placement_fn=(lambda p: Shard(1) if p.dim() > 1 else None) if dim_1 else None,
            )
    parameters: dict[str, torch.Tensor] = {n: p.detach() for n, p in model.named_parameters()}
    copies = {moment: {n: p.clone() for n, p in parameters.items()} for moment in MOMENTS[1:]}
    return {"model": parameters, **copies}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _truth(moment: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What the whole tensor holds: elements that tell where they belong."""
    start = sum(map(ord, moment + name)) * 1009
    return torch.arange(start, start + tensor.numel(), dtype=torch.int32).view(tensor.shape)


def _share(moment: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The same of the part that this rank holds."""
    whole = _truth(moment, name, tensor).view(torch.float32)
    if not isinstance(tensor, DTensor):
        return whole
    rank_of = tensor.device_mesh.get_coordinate()
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard) and rank_of is not None:
            parts = whole.chunk(tensor.device_mesh.size(dim), placement.dim)
            at = rank_of[dim]
            whole = parts[at] if at < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole


def save_both(rank: int, root: Path, size: Size, sharding: Sharding) -> int:
    """Save one state by both sides; the bytes of this rank's share."""
    state = build(size, sharding)
    for moment, tensors in state.items():
        for name, tensor in tensors.items():
            _local(tensor).copy_(_share(moment, name, tensor))
    with Checkpointer(root / "ours", on_error="raise") as checkpointer:
        checkpointer.save(state, STEP)
        checkpointer.wait()
    dcp.save(state, checkpoint_id=root / "dcp")
    return sum(_local(t).nbytes for tensors in state.values() for t in tensors.values())


def load_once(rank: int, side: Side, root: Path, size: Size, sharding: Sharding) -> Loaded:
    """Load by one side into a state whose memory exists, and compare what came with the truth."""
    state = build(size, sharding)
    for tensors in state.values():
        for tensor in tensors.values():
            _local(tensor).fill_(-1.0)
    checkpointer = Checkpointer(root / "ours") if side == "ours" else None
    dist.barrier()
    watch = Watch()
    began, cpu_began = time.perf_counter(), time.process_time()
    if checkpointer is not None:
        checkpointer.load(state, STEP)
    else:
        dcp.load(state, checkpoint_id=root / "dcp")
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    read_bytes, memory_bytes = watch.stop()
    if checkpointer is not None:
        checkpointer.close()
    wrong = [
        f"{moment}.{name}"
        for moment, tensors in state.items()
        for name, tensor in tensors.items()
        if not _same(_local(tensor), _share(moment, name, tensor))
    ]
    return Loaded(
        seconds=seconds,
        cpu_s=cpu_s,
        read_bytes=read_bytes,
        memory_bytes=memory_bytes,
        wrong=tuple(wrong),
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # As numbers some of these bits would be NaN.
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def flips(rank: int, side: Side, root: Path, size: Size, sharding: Sharding) -> str | None:
    """The error of a load, or None if there is none."""
    state = build(size, sharding)
    try:
        if side == "ours":
            with Checkpointer(root / "ours") as checkpointer:
                checkpointer.load(state, STEP)
        else:
            dcp.load(state, checkpoint_id=root / "dcp")
    except (Exception, dcp.CheckpointException) as error:
        return type(error).__name__
    return None
