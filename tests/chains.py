"""What stored generations build on, as their documents say. Knows the format and stores."""

from __future__ import annotations

from os import PathLike

from torch_ckpt.generations.catalog import Catalog, Generation
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
