"""The parts of a generation together: whether they belong together, and where each tensor lies.

Knows the schema. Knows nothing of stores, or of what one part says of itself.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from torch_ckpt.errors import FormatError
from torch_ckpt.manifest.schema import Manifest, Part
from torch_ckpt.manifest.tables import Heads, TensorTable
from torch_ckpt.manifest.tiling import Box, tiles

_OVERLAP = "tensor {!r} has chunks that overlap, and elements that no chunk holds"


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a generation with the chunks of all parts, which hold each element once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: array[int] = field(default_factory=lambda: array("q"))
    """Of every chunk its offsets, then its shape."""
    parts: array[int] = field(default_factory=lambda: array("q"))
    """Of every chunk the part that it is in."""
    starts: array[int] = field(default_factory=lambda: array("q"))
    """Of every chunk its first byte in that part's raw space."""


_Place = tuple[StoredTensor, int, int]
"""A tensor, and where in a part's table its boxes begin and end, in bytes."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What all parts of a generation say."""

    parts: list[Part]
    """In order of rank."""
    tensors: dict[str, StoredTensor]
    """By name, and not by alias."""


def check_parts(manifest: Manifest, parts: Sequence[Part], file: str) -> Whole:
    """See that these are the manifest's parts: one of each rank, and every tensor whole.

    Raises:
        FormatError: they are not; `file` is the manifest, for the message.
    """
    for part in parts:
        for fact in ("step", "attempt", "run", "world_size"):
            there, here = getattr(part, fact), getattr(manifest, fact)
            if there != here:
                reason = f"its {fact} is {here!r}, that of the part of rank {part.rank} {there!r}"
                raise FormatError(file=file, reason=reason)
        for one in part.borrowed:
            if one.step not in manifest.bases:  # nothing would keep that generation
                reason = f"rank {part.rank} borrows from step {one.step}, which is not in bases"
                raise FormatError(file=file, reason=reason)
            if one.attempt == part.attempt:
                reason = f"rank {part.rank} borrows from this very generation"
                raise FormatError(file=file, reason=reason)
    ranks = sorted(part.rank for part in parts)
    if ranks != list(range(manifest.world_size)):
        reason = f"has parts of ranks {ranks[:16]} for a world size of {manifest.world_size}"
        raise FormatError(file=file, reason=reason)
    shards = Counter(shard.name for part in parts for shard in part.files)
    shared = [name for name, count in shards.items() if count > 1]
    if shared:
        raise FormatError(file=file, reason=f"{shared[0]} belongs to several parts")
    total = sum(shard.bytes for part in parts for shard in part.files)
    if total != manifest.bytes:
        reason = f"says its shards have {manifest.bytes} bytes, its parts say {total}"
        raise FormatError(file=file, reason=reason)
    ordered = sorted(parts, key=attrgetter("rank"))
    return Whole(ordered, _tensors(ordered, file))


def check_own(part: Part, file: str) -> None:
    """Check what one part alone can get wrong about tensors that other parts hold as well."""
    for tensor in part.tensors:
        stored = sum(math.prod(chunk.shape) for chunk in tensor.chunks)
        whole = math.prod(tensor.shape)
        if stored > whole or (part.world_size == 1 and stored < whole):
            reason = f"tensor {tensor.name!r} has {whole} elements, its chunks {stored}"
            raise FormatError(file=file, reason=reason)
        boxes = [(chunk.offsets, chunk.shape) for chunk in tensor.chunks]
        if stored == whole and not _tiled(tensor.shape, boxes):
            raise FormatError(file=file, reason=_OVERLAP.format(tensor.name))


def _tensors(parts: Sequence[Part], file: str) -> dict[str, StoredTensor]:
    """The tensors of all parts, each of one kind and whole."""
    found = _gathered(parts, file)
    known: dict[tuple[object, ...], str | None] = {}
    for tensor in found.values():
        # Layers are cut up alike, so that few have to be looked at.
        key = (tensor.shape, len(tensor.parts), tensor.boxes.tobytes())
        if key not in known:
            known[key] = _wrong(tensor)
        if (wrong := known[key]) is not None:
            raise FormatError(file=file, reason=wrong.format(tensor.name))
    for part in parts:
        for alias, target in part.aliases.items():
            if target not in found or alias in found:
                reason = f"alias {alias!r} leads to {target!r}, which is no tensor"
                raise FormatError(file=file, reason=reason)
    return found


def _gathered(parts: Sequence[Part], file: str) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    heads: Heads | None = None
    here: list[_Place] = []
    for number, part in enumerate(parts):
        table = TensorTable.of(part.tensors)
        if heads is None or not heads.alike(table.heads):
            heads = table.heads
            tensors = _of_one_kind(table, found, part.rank, file)
            here = _places(tensors, heads.box_at)
        if table.one_each:
            boxes = table.boxes.cast("B")
            for (tensor, first, last), start in zip(here, table.starts, strict=True):
                tensor.boxes.frombytes(boxes[first:last])
                tensor.parts.append(number)
                tensor.starts.append(start)
        else:
            _add(number, table, [tensor for tensor, _, _ in here])
    return found


def _places(tensors: Sequence[StoredTensor], box_at: Sequence[int]) -> list[_Place]:
    edges = [at * 8 for at in box_at]
    return list(zip(tensors, edges, edges[1:], strict=False))


def _add(number: int, table: TensorTable, tensors: Sequence[StoredTensor]) -> None:
    """The chunks of a part, any number of each, to those of its tensors."""
    boxes = table.boxes.cast("B")
    for index, (tensor, first, last) in enumerate(_places(tensors, table.box_at)):
        starts = table.starts[table.chunk_at[index] : table.chunk_at[index + 1]]
        tensor.boxes.frombytes(boxes[first:last])
        tensor.parts.extend([number] * len(starts))
        tensor.starts.extend(starts)


def _of_one_kind(
    table: TensorTable, found: dict[str, StoredTensor], rank: int, file: str
) -> list[StoredTensor]:
    """The tensors of a part among those found so far, to which new ones are added."""
    here = []
    for index, name in enumerate(table.heads.names):
        dtype, shape = table.heads.dtype_of(index), table.heads.shape(index)
        tensor = found.get(name)
        if tensor is None:
            tensor = found[name] = StoredTensor(name, dtype, shape)
        elif (tensor.dtype, tensor.shape) != (dtype, shape):
            reason = f"tensor {name!r} has another dtype or shape on rank {rank}"
            raise FormatError(file=file, reason=reason)
        here.append(tensor)
    return here


def _wrong(tensor: StoredTensor) -> str | None:
    """Why its chunks are not the whole tensor, with a place for its name; None if they are."""
    dims, rows = len(tensor.shape), tensor.boxes.tolist()
    edges = range(0, 2 * dims * len(tensor.parts), 2 * dims) if dims else [0] * len(tensor.parts)
    boxes = [(rows[at : at + dims], rows[at + dims : at + 2 * dims]) for at in edges]
    stored, whole = sum(math.prod(shape) for _, shape in boxes), math.prod(tensor.shape)
    if stored != whole:
        return (
            f"tensor {{!r}} has {whole} elements, its chunks {stored}: "
            "it is not stored whole, or more than once"
        )
    return None if _tiled(tensor.shape, boxes) else _OVERLAP


def _tiled(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether chunks with as many elements as the tensor hold each of them."""
    # One chunk as large as the tensor is the tensor: parsing saw that it lies inside.
    return len(boxes) <= 1 or tiles(shape, boxes)
