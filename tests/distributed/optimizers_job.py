"""Models under FSDP2 with every kind of optimizer state, saved by some ranks and loaded by others.

Knows optimizers and DCP's state dicts. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from tests.distributed.sharded_job import Net, equal, train, whole
from torch_ckpt import Checkpointer

Optimizer = torch.optim.Optimizer


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.01}]


def _frozen(model: nn.Module) -> Optimizer:
    for parameter in model.get_submodule("up").parameters():
        parameter.requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def _partial(model: nn.Module) -> Optimizer:
    """Half of the parameters have been stepped, as after unfreezing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    up = list(model.get_submodule("up").parameters())
    for parameter in up:
        parameter.requires_grad_(False)
    train(model, optimizer, 1)
    for parameter in up:
        parameter.requires_grad_(True)
    return optimizer


KINDS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, amsgrad=True, foreach=False),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.05, momentum=0.5),
    "groups": lambda m: torch.optim.AdamW(_groups(m), lr=0.05),
    "frozen": _frozen,
    "partial": _partial,
}


def build(kind: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, KINDS[kind](model)


def _state(model: nn.Module, optimizer: Optimizer, scalar: torch.Tensor) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "scalar": scalar}


def _scalar(value: float) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.tensor(value), mesh, [Replicate()])


def _truth(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": whole(model.state_dict()), "optimizer": whole(optimizer.state_dict())}


def save_kinds(rank: int, root: str, steps: dict[str, int]) -> None:
    """Each kind in a root of its own, after so many steps."""
    for kind, count in steps.items():
        model, optimizer = build(kind)
        train(model, optimizer, count)
        with Checkpointer(f"{root}/{kind}") as checkpointer:
            state = _state(model, optimizer, _scalar(2.5))
            checkpointer.save(state, count, block="committed")
        truth = _truth(model, optimizer)
        truth["losses"] = train(model, optimizer, 2)
        if rank == 0:
            torch.save(truth, f"{root}/{kind}.pt")
    dist.barrier()


def load_kinds(rank: int, root: str, steps: dict[str, int]) -> dict[str, list[str]]:
    """Into an optimizer before its first step and into one after it; what differs."""
    odd: dict[str, list[str]] = {}
    for kind in steps:
        truth = torch.load(f"{root}/{kind}.pt")
        for before in (0, 3):
            model, optimizer = build(kind)
            train(model, optimizer, before)
            scalar = _scalar(0.0)
            with Checkpointer(f"{root}/{kind}") as checkpointer:
                checkpointer.resume(_state(model, optimizer, scalar))
            found = equal({k: truth[k] for k in ("model", "optimizer")}, _truth(model, optimizer))
            found += _sharded_alike(optimizer)
            assert isinstance(scalar, DTensor)
            if scalar.to_local().item() != 2.5:
                found.append("scalar")
            losses = torch.tensor(train(model, optimizer, 2))
            if not torch.allclose(losses, torch.tensor(truth["losses"]), rtol=1e-4):
                found.append(f"losses {losses.tolist()} {truth['losses']}")
            odd[f"{kind} after {before}"] = found
    return odd


def _sharded_alike(optimizer: Optimizer) -> list[str]:
    """State of the parameter's shape must be shared out as the parameter is."""
    odd = []
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                whose = getattr(parameter, "placements", None)
                alike = isinstance(value, DTensor) and value.placements == whose
                odd += [] if alike else [f"{name} is a {type(value).__name__}"]
    return odd


def save_dicts(rank: int, root: str) -> None:
    """What `get_state_dict` and its kin hand out, saved as they are."""
    model, optimizer = build("groups")
    train(model, optimizer, 2)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(_dicts(model, optimizer), 2, block="committed")
    truth = _truth(model, optimizer)
    if rank == 0:
        torch.save(truth, f"{root}/truth.pt")
    dist.barrier()


def _dicts(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 2,
    }


def load_dicts(rank: int, root: str) -> list[str]:
    """Into such dicts, and from there into model and optimizer."""
    model, optimizer = build("groups")
    train(model, optimizer, 1)
    state = _dicts(model, optimizer)
    with Checkpointer(root) as checkpointer:
        checkpointer.resume(state)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return equal(torch.load(f"{root}/truth.pt"), _truth(model, optimizer))
