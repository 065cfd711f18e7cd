"""Who writes which part of which tensor, and where it lies in the writer's slab.

A plan is kept while the state keeps its shape. To make a new one, ranks tell each other the boxes
they hold of tensors that are shared out, as one tensor of numbers and no objects; the rest follows
from what they have in common, on every rank alike. Knows tensors' shapes and ranks. Knows nothing
of memory or storage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from torch_ckpt.errors import UnsupportedState
from torch_ckpt.manifest.blocks import Piece, Placed, place
from torch_ckpt.sharding.differences import fingerprint_of
from torch_ckpt.sharding.owners import SMALL_BYTES, Found, Held, assign, claims, whole
from torch_ckpt.staging.regions import dtype_name
from torch_ckpt.staging.sharded import Box, boxes, layout_of, meshes_of, replicas_of
from torch_ckpt.staging.tree import Flat

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")

Signature = tuple[object, ...]
Exchange = Callable[[torch.Tensor], list[torch.Tensor]]
"""Rows of numbers of this rank in, those of every rank out, in order of rank."""


@dataclass(frozen=True)
class Plan:
    """One rank's share of a state."""

    placed: list[Placed]
    raw_bytes: int
    cuts: Mapping[int, tuple[int, int, int]]
    """By position in `placed`: dimension, start and length of a piece of what this rank has."""
    mesh: Sequence[Mapping[str, Any]] = ()
    """The meshes over which tensors are shared out, for people."""

    @cached_property
    def names(self) -> list[str]:
        """The name of every piece."""
        return [item.piece.name for item in self.placed]

    @cached_property
    def described(self) -> list[tuple[Any, ...]]:
        """The layout as a job carries it."""
        return [(*item.piece, item.start) for item in self.placed]

    @cached_property
    def described_json(self) -> bytes:
        """The same as JSON."""
        return json.dumps(self.described, separators=(",", ":")).encode("ascii")

    def part(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor as this rank has it, what is at a position of the plan."""
        cut = self.cuts.get(position)
        return tensor if cut is None else tensor.narrow(*cut)


@dataclass(frozen=True)
class Survey:
    """What a rank knows of a state before it has met its peers."""

    signature: Signature
    fingerprint: str
    """Equal on all ranks if and only if their states have the same shared tensors."""


class Planner:
    """Plans, and keeps the last plan while the state keeps its shape."""

    def __init__(
        self, rank: int, world_size: int, group: Callable[[str], int] | None = None
    ) -> None:
        """Small tensors lie beside others of their `group`, by their names."""
        self._rank, self._world_size, self._group = rank, world_size, group
        self._survey: Survey | None = None
        self._plan: Plan | None = None

    def survey(self, flat: Flat) -> Survey:
        """What has to be the same on all ranks; cheap while the state keeps its shape."""
        tensors = flat.tensors.values()
        signature: Signature = (
            tuple(zip(flat.tensors, map(_dtype, tensors), map(_shape, tensors), strict=True)),
            tuple((name, *layout_of(t)) for name, t in flat.sharded.items()),
            frozenset(flat.own),
            tuple(flat.per_rank),
        )
        if self._survey is None or signature != self._survey.signature:
            fingerprint = fingerprint_of(flat) if self._world_size > 1 else ""
            self._survey, self._plan = Survey(signature, fingerprint), None
        return self._survey

    @property
    def stale(self) -> bool:
        """Whether the state has another shape than the plan that is kept."""
        return self._plan is None

    def plan(
        self,
        flat: Flat,
        exchange: Exchange,
        *,
        afresh: bool = False,
        unowned: Callable[[], Mapping[str, bool]] | None = None,
    ) -> Plan:
        """This rank's share of the state that was surveyed last.

        All ranks call `exchange` or none does: `afresh` if the plan of any of them is stale.
        `unowned` names tensors that no optimizer owns, so that ranks that agree on everything else
        may differ in them, each with whether it is a buffer for certain. Of those that are not
        sharded, rank 0's count if they are: the pieces of a large one, shared out, could be those
        of different versions. So do the rest's if they are small; large ones are frozen weights.

        Raises:
            UnsupportedState: a tensor is shared out over ranks that take no part.
        """
        if self._plan is None or afresh:
            self._plan = self._fresh(flat, exchange, unowned)
        return self._plan

    def estimate(self, flat: Flat) -> int:
        """About how many bytes the plan of this rank will have; asks nobody."""
        own = sum(t.nbytes for name, t in flat.tensors.items() if name in flat.own)
        held = sum(flat.tensors[n].nbytes // replicas_of(t) for n, t in flat.sharded.items())
        alike = [
            t.nbytes for n, t in flat.tensors.items() if n not in flat.own and n not in flat.sharded
        ]
        if self._world_size == 1:
            return own + held + sum(alike)
        share = sum(alike) // self._world_size
        return own + (held + share) * 11 // 10 + max(alike, default=0) // 10

    def _fresh(
        self,
        flat: Flat,
        exchange: Exchange,
        unowned: Callable[[], Mapping[str, bool]] | None = None,
    ) -> Plan:
        if self._world_size == 1 and not flat.sharded:
            return self._planned([_complete(name, t) for name, t in flat.tensors.items()])
        shared = [name for name in flat.tensors if name not in flat.own]
        held = boxes(flat.sharded)
        alike = [
            whole(index, flat.tensors[name].shape, flat.tensors[name].itemsize, self._world_size)
            for index, name in enumerate(shared)
            if name not in flat.sharded
        ]
        found = self._claims(flat, shared, held, exchange)
        of_first: set[int] = set()
        if unowned is not None and self._world_size > 1:
            names = unowned()
            bound = [
                claim.tensor
                for claim in alike
                if (certain := names.get(shared[claim.tensor])) is not None
                and (certain or claim.bytes < SMALL_BYTES)
            ]
            # Rank 0's word, so that all ranks come to one plan whatever their optimizers hold.
            mine = torch.tensor(bound, dtype=torch.int64).reshape(len(bound), 1)
            of_first = set(exchange(mine)[0].flatten().tolist())
        owned = assign([*alike, *found.shared], found.loads, of_first=of_first)
        written = [*found.alone, *(claim for rank, claim in owned if rank == self._rank)]
        written.sort(key=lambda claim: (claim.tensor, claim.box.offsets))
        pieces = [_piece(shared[c.tensor], flat, c.box) for c in written]
        pieces += [_piece(n, flat, _all(t)) for n, t in flat.tensors.items() if n in flat.own]
        plan = self._planned(pieces)
        mesh = meshes_of(flat.sharded.values())
        return replace(plan, cuts=_cuts(plan.placed, flat, held), mesh=mesh)

    def _planned(self, pieces: list[Piece]) -> Plan:
        placed = place(pieces) if self._group is None else place(pieces, self._group)
        return Plan(placed, sum(piece.bytes for piece in pieces), {})

    def _claims(
        self, flat: Flat, shared: list[str], held: Mapping[str, Box], exchange: Exchange
    ) -> Found:
        if not flat.sharded:
            return Found([], [], [0] * self._world_size, [], [])
        positions = {name: index for index, name in enumerate(shared)}
        # A rank outside of a tensor's mesh has a local tensor of other dimensions.
        shapes = [tuple(flat.sharded.get(name, flat.tensors[name]).shape) for name in shared]
        most = max(tensor.dim() for tensor in flat.sharded.values())
        rows = [
            [positions[name], *_padded(box.offsets, most, 0), *_padded(box.shape, most, 1)]
            for name, box in held.items()
        ]
        mine = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 1 + 2 * most)
        tables = [table.numpy() for table in exchange(mine)]
        everything = np.concatenate(tables)
        ranks = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        found = claims(
            Held(everything[:, 0], ranks, everything[:, 1:]),
            shapes,
            [flat.tensors[name].itemsize for name in shared],
            rank=self._rank,
            world_size=self._world_size,
        )
        for name, tensor in flat.sharded.items():
            at = positions[name]
            _check_whole(name, tensor.shape, found.elements[at], tiled=found.tiled[at])
        return found


def _padded(values: tuple[int, ...], size: int, filler: int) -> list[int]:
    return [*values, *[filler] * (size - len(values))]


def _check_whole(name: str, shape: torch.Size, elements: int, *, tiled: bool) -> None:
    """Boxes of all ranks together make every tensor whole."""
    if elements == shape.numel() and not tiled:
        raise UnsupportedState(
            key=name,
            what="a DTensor of which ranks hold some elements in several different boxes, and "
            "others in none",
            remedy="give it the same mesh and placements on every rank",
        )
    if elements != shape.numel():
        raise UnsupportedState(
            key=name,
            what=f"a DTensor of {shape.numel()} elements of which the ranks that save "
            f"together hold {elements}",
            remedy="let every rank of its mesh take part, with distributed=None",
        )


def _all(tensor: torch.Tensor) -> Box:
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def _piece(name: str, flat: Flat, box: Box) -> Piece:
    tensor = flat.tensors[name]
    globally = flat.sharded.get(name, tensor)
    return Piece(name, dtype_name(tensor.dtype), box.shape, box.offsets, tuple(globally.shape))


def _complete(name: str, tensor: torch.Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(name, dtype_name(tensor.dtype), shape, (0,) * len(shape), shape)


def _cuts(
    placed: list[Placed], flat: Flat, held: Mapping[str, Box]
) -> dict[int, tuple[int, int, int]]:
    cuts = {}
    for position, item in enumerate(placed):
        piece = item.piece
        box = held.get(piece.name) or _all(flat.tensors[piece.name])
        for dim, (mine, there) in enumerate(zip(piece.shape, box.shape, strict=True)):
            if mine != there:
                start = piece.offsets[dim] - box.offsets[dim]
                cuts[position] = (dim, start, mine)
    return cuts
