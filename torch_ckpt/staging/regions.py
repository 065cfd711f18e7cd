"""Where the tensors of a state live: what can be saved, what is the same twice, what is shared out.

Works on all tensors of a state at once, in loops of C: every call from Python is paid a
thousandfold while training waits. Knows tensors and DTensors. Knows nothing of nesting or slabs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from torch_ckpt.errors import UnsupportedState
from torch_ckpt.manifest.dtypes import DTYPES
from torch_ckpt.staging.sharded import check_sharded, is_sharded, local_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Region = tuple[object, ...]
"""Address, dtype, shape, strides, and whether elements are to be negated or conjugated."""

_DTYPES = {getattr(torch, name): name for name in DTYPES}
_PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
_STRIDED = {torch.strided}
_layout, _dtype, _shape = attrgetter("layout"), attrgetter("dtype"), attrgetter("shape")
_is_meta, _is_nested = attrgetter("is_meta"), attrgetter("is_nested")


@dataclass
class Lived:
    """Tensors by name, every one once, and where they are."""

    tensors: dict[str, torch.Tensor]
    """Of a sharded one, what is in this process."""
    sharded: dict[str, DTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of the same elements."""


def look_up(named: dict[str, torch.Tensor], own: Collection[str]) -> Lived:
    """Find out where tensors live; `own` names those that this rank alone has.

    Raises:
        UnsupportedState: one of them cannot be saved; the message names it.
    """
    found = Lived(named)
    if not set(map(type, named.values())) <= _PLAIN_TENSORS:
        found.sharded = {name: t for name, t in named.items() if is_sharded(t)}
        for name, tensor in found.sharded.items():
            if name in own:
                raise UnsupportedState(
                    key=name.rpartition("@rank")[0],
                    what="a DTensor inside a PerRank",
                    remedy="save its `.to_local()`",
                )
            check_sharded(name, tensor)
        found.tensors = {name: local_of(t) for name, t in named.items()}
    _check_all(found.tensors)
    addresses = list(map(torch.Tensor.data_ptr, found.tensors.values()))
    if len(set(addresses)) < len(addresses):
        _tie(found, own)
    return found


def regions_of(tensors: Collection[torch.Tensor]) -> list[Region]:
    """The regions of many tensors; two tensors are one exactly if these are equal."""
    tensor = torch.Tensor
    return list(
        zip(
            map(tensor.data_ptr, tensors),
            map(_dtype, tensors),
            map(_shape, tensors),
            map(tensor.stride, tensors),
            map(tensor.is_neg, tensors),
            map(tensor.is_conj, tensors),
            strict=True,
        )
    )


def region_of(tensor: torch.Tensor) -> Region:
    """The region of one tensor."""
    return regions_of([tensor])[0]


def _tie(found: Lived, own: Collection[str]) -> None:
    """Keep the first of the names of every region."""
    first: dict[Region, str] = {}
    regions = regions_of(found.tensors.values())
    for (name, tensor), region in zip(list(found.tensors.items()), regions, strict=True):
        shared = found.sharded.get(name)
        empty = not region[0]  # without an element there is no address to tell it by
        if empty and shared is None:
            continue
        # A tensor of this rank alone must not stand in for one that all ranks share.
        identity: Region = (*region, name in own)
        if shared is not None:
            # Also if this rank's part is empty: all ranks must find the same names tied.
            place = (tensor.untyped_storage()._cdata,) if empty else region
            identity = (*place, shared.shape, shared.placements)
        primary = first.setdefault(identity, name)
        if primary is not name:
            found.aliases[name] = primary
            del found.tensors[name]
            found.sharded.pop(name, None)


def _check_all(tensors: dict[str, torch.Tensor]) -> None:
    values = tensors.values()
    if (
        set(map(type, values)) <= _PLAIN_TENSORS
        and set(map(_layout, values)) <= _STRIDED
        and set(map(_dtype, values)) <= _DTYPES.keys()
        and not any(map(_is_meta, values))
        and not any(map(_is_nested, values))
    ):
        return
    for name, tensor in tensors.items():
        check_supported(name, tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's own name of a dtype without the module."""
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def check_supported(path: str, tensor: torch.Tensor) -> None:
    """Refuse tensors whose bytes a generation cannot hold, by name.

    Raises:
        UnsupportedState: with what to do instead.
    """
    plain = type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided
    if plain and tensor.dtype in _DTYPES and not (tensor.is_meta or tensor.is_nested):
        return
    what = remedy = ""
    if type(tensor) not in _PLAIN_TENSORS and not isinstance(tensor, torch.nn.Parameter):
        what, remedy = f"a {type(tensor).__name__}", "save its plain tensors instead"
    elif tensor.layout != torch.strided:
        what, remedy = f"a {dtype_name(tensor.layout)} tensor", "save its parts or `.to_dense()`"  # type: ignore[arg-type]
    elif tensor.is_nested:
        what, remedy = "a nested tensor", "save `.unbind()` or its values and offsets"
    elif tensor.is_quantized:
        what, remedy = "a quantised tensor", "save `.int_repr()`, scale and zero point"
    elif tensor.device.type == "meta":
        what, remedy = "a meta tensor, which has no data", "materialise it first"
    elif dtype_name(tensor.dtype) not in DTYPES:
        what, remedy = f"a tensor of {dtype_name(tensor.dtype)}", "convert it to another dtype"
    if what:
        raise UnsupportedState(key=path, what=what, remedy=remedy)
