"""What stored generations build on, as their documents say, and whether every bit is right.

Knows the format and stores.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch

from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.verify import verify
from torch_ckpt.manifest.commit import read_parts
from torch_ckpt.manifest.schema import Part
from torch_ckpt.storage.local import LocalStore


def store_at(root: str | PathLike[str]) -> LocalStore:
    """The store of a run."""
    return LocalStore(str(root))


def by_step(root: str | PathLike[str]) -> dict[int, Generation]:
    """The committed generations of a root whose steps are all different."""
    committed = Catalog(store_at(root)).committed()
    found = {one.step: one for one in committed}
    assert len(found) == len(committed), committed
    return found


def bases(root: str | PathLike[str]) -> dict[int, tuple[int, ...]]:
    """The steps that each step builds on."""
    return {step: one.manifest.bases for step, one in sorted(by_step(root).items())}


def part(root: str | PathLike[str], generation: Generation, rank: int = 0) -> Part:
    """The part of one rank."""
    return read_parts(store_at(root), generation.folder, generation.manifest)[rank]


def codecs(root: str | PathLike[str], generation: Generation, rank: int = 0) -> set[str]:
    """The codecs of all blocks that one rank's part names, bases too."""
    found = part(root, generation, rank)
    return {block.codec for block in (*found.blocks, *found.bases)}


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, also of a type that compares with nothing."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Fail unless two flat states are bit for bit the same."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if isinstance(tensor, torch.Tensor):
            assert found[name].dtype == tensor.dtype, name
            assert found[name].shape == tensor.shape, name
            assert bits(found[name]) == bits(tensor), name
        else:
            assert found[name] == tensor, name


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A flat state whose tensors nobody else has."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def assert_sound(root: str | PathLike[str]) -> None:
    """Fail unless every generation verifies."""
    store = store_at(root)
    for one in Catalog(store).committed():
        report = verify(store, one)
        assert report.ok, report.damages
