"""Whose memory a tensor is: an optimizer's, and whether it is what it was at the last save.

Knows storages and versions. Knows nothing of slabs or jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_ckpt.staging.regions import region_of, regions_of
from torch_ckpt.staging.sharded import is_sharded, local_of
from torch_ckpt.staging.slab import Slab
from torch_ckpt.staging.snapshot import Source, Views, holds, version_of
from torch_ckpt.staging.tree import Flat


class Owned:
    """Memory that only an optimizer's step changes: its parameters and its state."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        parameters: list[torch.Tensor] = []
        # Its state hands out the tensors themselves, its parameters reach a state as aliases.
        self._itself: set[int] = set()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                parameters += map(local_of, group["params"])
            for state in optimizer.state.values():
                self._itself.update(map(id, state.values()))
                parameters += [local_of(v) for v in state.values() if is_sharded(v)]
        # By region rather than by storage: a larger tensor that shares memory with a parameter
        # may have elements that nobody vouches for.
        self._regions = set(regions_of(parameters))

    def which(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Of each tensor of a state, whether it is such memory."""
        owned = [id(tensor) in self._itself for tensor in tensors]
        rest = [index for index, known in enumerate(owned) if not known]
        regions = regions_of([tensors[index] for index in rest])
        for index, region in zip(rest, regions, strict=True):
            owned[index] = region in self._regions
        return owned


_STATES_PER_PARAMETER = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Adadelta": 2}


def unowned(flat: Flat, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, bool]:
    """The tensors of a state that no optimizer owns, such as running statistics.

    Each with whether it is a module's buffer for certain. Of the others, some may be buffers of
    modules whose `state_dict` alone is known. Without an optimizer, in the state or among
    `optimizers`, nobody can tell, and certain buffers are all there is.
    """
    names, tensors = list(flat.tensors), list(flat.tensors.values())
    regions = regions_of(tensors)
    held = [buffer for module in flat.modules for buffer in module.buffers()]
    # One that is not saved may be of any kind.
    plain = [b for b in held if type(b) is torch.Tensor and b.layout is torch.strided]
    buffers = set(regions_of([b for b in plain if not b.is_meta]))
    certain = {name: True for name, one in zip(names, regions, strict=True) if one in buffers}
    known = [*optimizers, *flat.optimizers]
    if not known:
        return certain
    owned = Owned(known).which(tensors)
    return {name: name in certain for name, one in zip(names, owned, strict=True) if not one}


def expected_growth(optimizers: Iterable[torch.optim.Optimizer], flat: Flat) -> int:
    """Bytes that optimizers will add to a state once they have made their first step.

    Most optimizers make their state in the first step; a slab that is sized before it would be
    too small. Optimizers not known here are taken to keep two tensors a parameter, as Adam does.
    """
    saved = set(regions_of(flat.tensors.values()))
    growth = 0
    for optimizer in optimizers:
        states = _STATES_PER_PARAMETER.get(type(optimizer).__name__, 2)
        for group in optimizer.param_groups:
            per_parameter = states + bool(group.get("momentum"))
            for parameter in group["params"]:
                fresh = parameter.requires_grad and not optimizer.state.get(parameter)
                local = local_of(parameter)
                if fresh and region_of(local) in saved:
                    growth += per_parameter * local.numel() * local.element_size() + 8
    return growth


class Unchanged:
    """Remembers what the last save saw, to tell a second name from a second snapshot.

    Versions rule a second name out early. The copies decide, since `.data`, numpy and inference
    mode change a tensor without a trace.
    """

    def __init__(self) -> None:
        self._known: tuple[str, int, str] | None = None
        self._seen: list[tuple[object, ...]] = []
        self._copies: dict[str, torch.Tensor] = {}
        # A weak reference keeps the address of a dead storage from being given away again.
        self._storages: list[StorageWeakRef] = []

    def rename(self, folder: str) -> None:
        """The same bytes have got a second name."""
        if self._known is not None:
            self._known = (*self._known[:2], folder)

    def remember(
        self,
        root: str,
        step: int,
        folder: str,
        flat: Flat,
        slab: Slab,
        sources: Sequence[Source],
    ) -> None:
        """What a save sees, and its copies, which stay as they are until the next snapshot."""
        if flat.arrays:  # copies of arrays and objects have no identity to go by
            self.forget()
            return
        self._known = (root, step, folder)
        self._seen = _seen(flat)
        views = Views(slab)
        self._copies = {source.name: views.of(source.place) for source in sources}
        self._storages = [StorageWeakRef(t.untyped_storage()) for t in flat.tensors.values()]

    def forget(self) -> None:
        """The last save is nothing to refer to."""
        self._known, self._seen, self._storages, self._copies = None, [], [], {}

    def folder_of(self, root: str, step: int, folder: str, flat: Flat) -> str | None:
        """The folder that holds these very bytes; None if they have to be copied."""
        if self._known is None or self._known[:2] != (root, step) or self._known[2] == folder:
            return None
        if flat.arrays or any(storage.expired() for storage in self._storages):
            return None
        if _seen(flat) != self._seen:
            return None
        same = all(holds(copy, flat.tensors[name].detach()) for name, copy in self._copies.items())
        return self._known[2] if same else None


def _seen(flat: Flat) -> list[tuple[object, ...]]:
    """In order, since the layout of a shard follows it."""
    tensors = flat.tensors.values()
    together = zip(flat.tensors, regions_of(tensors), map(version_of, tensors), strict=True)
    return list(together)
