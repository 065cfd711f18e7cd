"""A moment: the random state of this process and of its loaders' own generators.

Knows generators, and where loaders keep theirs. Knows nothing of Lightning.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_ckpt import RngState

Moment = dict[str, Any]
"""The random state at one moment, of this process and of its loaders' own generators; and which
loaders had workers that outlive an iteration."""


def moment(loaders: list[Any]) -> Moment:
    """The random state now."""
    return {
        "process": RngState().state_dict(),
        "generators": [[g.get_state() for g in generators(loader)] for loader in loaders],
        "running": [has_running_workers(loader) for loader in loaders],
    }


def go_back(to: Moment, loaders: list[Any]) -> None:
    """Put back the random state of `to`."""
    RngState().load_state_dict(to["process"])
    for loader, states in zip(loaders, to["generators"], strict=False):
        for generator, state in zip(generators(loader), states, strict=False):
            generator.set_state(torch.as_tensor(state))


def derived(saved: Moment, rank: int, world_size: int) -> Moment:
    """What a saved moment becomes on one of another number of ranks, always in the same way."""
    process = RngState().reshard_state_dict([saved["process"]], rank, world_size)
    return {**saved, "process": process, "running": []}


def generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader, its sampler and its batch sampler own."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    found = [getattr(owner, "generator", None) for owner in owners]
    unique = {id(item): item for item in found if isinstance(item, torch.Generator)}
    return list(unique.values())


def has_running_workers(loader: Any) -> bool:
    """Whether its workers outlive an iteration, and run already."""
    return bool(getattr(loader, "persistent_workers", False)) and (
        getattr(loader, "_iterator", None) is not None
    )


def length(loader: Any) -> int | None:
    """How many batches a loader has, if it knows."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
