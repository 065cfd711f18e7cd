"""A live state as a typed document plus the tensors that the document names.

Knows tensors, modules and other stateful objects. Knows nothing of memory regions or storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_ckpt.errors import UnsupportedState
from torch_ckpt.staging.objects import Json, encode
from torch_ckpt.staging.regions import look_up

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = {str, int, float, bool, type(None), dict, list, tuple}


@dataclass(frozen=True)
class PerRank:
    """Marks a value in a state that belongs to this rank alone.

    It is stored by every rank and returned to the same rank: random state, data position.
    """

    value: Any


@dataclass
class Flat:
    """A state taken apart. Tensors are the live ones: nothing has been copied."""

    tree: Json = None
    per_rank: dict[str, Json] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By name; every storage region once. Of a sharded one, what is in this process."""
    sharded: dict[str, DTensor] = field(default_factory=dict)
    """Those that other ranks hold parts of."""
    aliases: dict[str, str] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    """Names of tensors inside PerRank values: this rank writes them itself."""
    arrays: set[str] = field(default_factory=set)
    """Names of tensors that only carry the bytes of an array or an object."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    """Optimizers met on the way."""
    modules: list[torch.nn.Module] = field(default_factory=list)
    """Modules met on the way."""


def is_stateful(value: object) -> bool:
    """Whether a value hands out its state and takes it back.

    One whose state is a dict of strings may name `unread_keys`, which a load leaves out.
    """
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
    )


def flatten(state: object, *, rank: int = 0, path: str = "") -> Flat:
    """Take a state apart, calling `state_dict()` where there is one.

    Raises:
        UnsupportedState: something in it cannot be saved; the message names it.
    """
    encoder = _TreeEncoder(rank)
    encoder.flat.tree = encode(state, path, encoder)
    flat = encoder.flat
    arrays = {name: flat.tensors.pop(name) for name in flat.arrays}
    lived = look_up(flat.tensors, flat.own)
    flat.sharded, flat.aliases = lived.sharded, lived.aliases
    flat.tensors = {**lived.tensors, **arrays}
    return flat


class _TreeEncoder:
    """Collects tensors while the object encoder walks the state."""

    def __init__(self, rank: int) -> None:
        self.flat = Flat()
        self._rank = rank
        self._suffix = ""

    def leaf(self, path: str, value: object) -> Json | None:
        """Encode what only a training state has; None for plain values."""
        if type(value) in _PLAIN:
            return None
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(path, value)}
        if isinstance(value, PerRank):
            return self._per_rank(path, value)
        if is_stateful(value):
            if isinstance(value, torch.optim.Optimizer):
                self.flat.optimizers.append(value)
            elif isinstance(value, torch.nn.Module):
                self.flat.modules.append(value)
            return encode(value.state_dict(), path, self)  # type: ignore[attr-defined]
        return None

    def blob(self, path: str, data: np.ndarray[Any, Any]) -> str:
        """Store an array's bytes beside the tensors; it is copied when the snapshot is taken."""
        name = self._keep(path, torch.from_numpy(data))
        self.flat.arrays.add(name)
        return name

    def _per_rank(self, path: str, value: PerRank) -> Json:
        if self._suffix:
            raise UnsupportedState(
                key=path, what="a PerRank inside another", remedy="mark the outer value only"
            )
        self._suffix = f"@rank{self._rank}"
        try:
            self.flat.per_rank[path] = encode(value.value, path, self)
        finally:
            self._suffix = ""
        return {"$per_rank": path}

    def _keep(self, path: str, tensor: torch.Tensor) -> str:
        """Register a tensor under its key path; a later one that reads the same gets a number."""
        name = first = (path or "state") + self._suffix
        tensors, tries = self.flat.tensors, 1
        while name in tensors:
            tries += 1
            name = f"{first}~{tries}"
        tensors[name] = tensor
        if self._suffix:
            self.flat.own.add(name)
        return name
