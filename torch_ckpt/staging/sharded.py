"""DTensors: which tensors are shared out over ranks, and which boxes of them this rank holds.

Knows DTensor by its public face, and DCP's planner, which works the boxes out. Knows nothing of
slabs or of who writes what.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from torch_ckpt.errors import UnsupportedState

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether no element is in it."""
        return 0 in self.shape


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor. Imports nothing: without the module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is in this process: a DTensor's local tensor, any other one itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # otherwise an autograd function makes a view of it
        return tensor.to_local()


def layout_of(tensor: DTensor) -> tuple[object, ...]:
    """What decides which boxes a rank holds: equal layouts give equal boxes on every rank."""
    return tuple(tensor.shape), tensor.placements, tensor.device_mesh


def described(tensor: DTensor) -> list[object]:
    """The same for people and digests, without what differs between ranks."""
    mesh = tensor.device_mesh
    return [list(tensor.shape), [str(p) for p in tensor.placements], list(mesh.shape)]


def meshes_of(tensors: Iterable[DTensor]) -> list[dict[str, Any]]:
    """The different meshes of some tensors, for people: shape and names of dimensions."""
    found: list[dict[str, Any]] = []
    for tensor in tensors:
        mesh = tensor.device_mesh
        names = list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None
        one = {"shape": list(mesh.shape), "names": names}
        if one not in found:
            found.append(one)
    return found


def replicas_of(tensor: DTensor) -> int:
    """How many ranks of its mesh hold the same box."""
    count = 1
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if placement.is_replicate():
            count *= size
    return count


def check_sharded(path: str, tensor: DTensor) -> None:
    """Refuse what no set of boxes describes.

    Raises:
        UnsupportedState: with what to do instead.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedState(
            key=path,
            what="a DTensor whose ranks hold terms of a sum (Partial)",
            remedy="`.redistribute()` it to Shard or Replicate first",
        )
    mesh = tensor.device_mesh.shape
    for number, placement in enumerate(tensor.placements):
        # DCP's planner takes a strided shard for one run of rows, which it is only below the
        # shard that it leaves room for.
        split = getattr(placement, "split_factor", None)
        if split is None:
            continue
        further = zip(tensor.placements[number + 1 :], mesh[number + 1 :], strict=True)
        dim = getattr(placement, "dim", None)
        if math.prod(size for other, size in further if other.is_shard(dim)) != split:
            raise UnsupportedState(
                key=path,
                what="a DTensor whose ranks hold rows that are not side by side "
                "(a strided shard without the shard below it)",
                remedy="`.redistribute()` it to Shard or Replicate first",
            )


def boxes(tensors: Mapping[str, DTensor]) -> dict[str, Box]:
    """This rank's box of each tensor; ranks outside of a tensor's mesh have none.

    Raises:
        UnsupportedState: a rank holds several boxes of one tensor.
    """
    if not tensors:
        return {}
    from torch.distributed.checkpoint import DefaultSavePlanner

    for name, tensor in tensors.items():
        check_sharded(name, tensor)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), None, False)
    found: dict[str, Box] = {}
    for item in planner.create_local_plan().items:
        name, data = item.index.fqn, item.tensor_data
        if data is None or name in found:
            raise UnsupportedState(
                key=name, what="a DTensor of several local pieces", remedy="save them one by one"
            )
        found[name] = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return found
