"""A small model trained under every kind of sharding, and what its whole state is.

Knows DTensor meshes. Knows nothing of files.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

SIZES = (50, 30)
"""Uneven over any number of ranks up to 4; rows of the last layer leave some of them empty."""


class Net(nn.Module):
    """Two blocks with a tied pair of weights and a layer of very few rows."""

    def __init__(self) -> None:
        super().__init__()
        hidden, width = SIZES
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2, bias=False)
        self.tied = self.head
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.norm(self.down(torch.relu(self.up(x)))))


def build(how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer under "whole", "fsdp", "hsdp", "tp" or "fsdp-tp"."""
    torch.manual_seed(0)
    model, world = Net(), dist.get_world_size() if dist.is_initialized() else 1
    if how in ("tp", "fsdp-tp"):
        shape = (world,) if how == "tp" else (world // 2, 2)
        names = ("tp",) if how == "tp" else ("dp", "tp")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"] if how == "fsdp-tp" else mesh, plan)
        if how == "fsdp-tp":
            fully_shard(model, mesh=mesh["dp"])
    elif how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif how == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The same batches on every rank, so that every sharding has the same gradients."""
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(4, SIZES[1], generator=generator)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(value: Any) -> Any:
    """A state without sharding: every DTensor made full, on every rank."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [whole(item) for item in value]
    return value


def equal(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two whole states differ in any bit."""
    if isinstance(left, torch.Tensor):
        same = isinstance(right, torch.Tensor) and left.dtype == right.dtype
        return [] if same and torch.equal(left, right) else [path]
    if isinstance(left, dict):
        if not isinstance(right, dict) or left.keys() != right.keys():
            return [f"{path}: keys"]
        return [odd for k in left for odd in equal(left[k], right[k], f"{path}.{k}")]
    if isinstance(left, list):
        if not isinstance(right, list) or len(left) != len(right):
            return [f"{path}: length"]
        pairs = enumerate(zip(left, right, strict=True))
        return [odd for i, (a, b) in pairs for odd in equal(a, b, f"{path}.{i}")]
    return [] if left == right else [path]
