"""A moment: the random state of this process and of one loader's own generators.

Knows generators, and where loaders keep theirs. Knows nothing of Accelerate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from typing_extensions import override

from torch_ckpt import RngState

Moment = dict[str, Any]
"""The random state at one moment: of the process, and of generators that a loader owns."""


class LateRandom(RngState):
    """The random state of this process; loaded now, put back when the rest has been loaded."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] | None = None

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state

    def put_back(self) -> None:
        """Give the process the state that was loaded."""
        if self.loaded is not None:
            super().load_state_dict(self.loaded)


def moment(loader: Any) -> Moment:
    """The random state now."""
    return {"process": RngState().state_dict(), "generators": own(loader)}


def go_back(to: Moment, loader: Any) -> None:
    """Put back the random state of `to`."""
    RngState().load_state_dict(to["process"])
    give(to["generators"], loader)


def own(loader: Any) -> dict[str, torch.Tensor]:
    """The states of a loader's own generators."""
    return {name: one.get_state() for name, one in generators(loader).items()}


def give(states: Mapping[str, Any], loader: Any) -> None:
    """Put a loader's own generators into these states; one that is not made yet is left out."""
    for name, generator in generators(loader).items():
        if name in states:
            generator.set_state(torch.as_tensor(states[name]))


def generators(loader: Any) -> dict[str, torch.Generator]:
    """The generators that a loader, its samplers and its streams own, each once.

    Named by their owner's place among those that could have one, so that a loader that passes
    over batches, with one more sampler around the others, gives them the same names.
    """
    able = [owner for owner in owners(loader) if hasattr(owner, "generator")]
    found = {str(place): owner.generator for place, owner in enumerate(able)}
    found["synchronized"] = getattr(loader, "synchronized_generator", None)
    named: dict[int, tuple[str, torch.Generator]] = {}
    for name, item in found.items():
        if isinstance(item, torch.Generator):
            named.setdefault(id(item), (name, item))
    return dict(named.values())


def owners(loader: Any) -> Iterator[Any]:
    """A loader, its samplers, inside out, and its dataset."""
    base = getattr(loader, "base_dataloader", loader)
    yield base
    seen: set[int] = set()
    waiting = [getattr(base, "batch_sampler", None), getattr(base, "sampler", None)]
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [getattr(one, "batch_sampler", None), getattr(one, "sampler", None)]
    yield getattr(base, "dataset", None)
