"""What a DCP folder holds and where, checked before a byte of it is read.

Knows DCP's description of tensors, chunks and files. Knows nothing of torch or of what the bytes
are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from torch_ckpt.errors import FormatError
from torch_ckpt.foreign.allowlist import (
    BytesMetadata,
    ChunkMetadata,
    Index,
    Metadata,
    Record,
    StorageInfo,
    TensorMetadata,
    TensorProperties,
    read_pickle,
)
from torch_ckpt.manifest.dtypes import DTYPES
from torch_ckpt.manifest.layout import check_name

FILE = ".metadata"

_MAX_DIMS = 32
_MAX_CELLS = 1 << 22
"""More than any grid of ranks has; a hostile list of chunks may not cost gigabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Bytes of one file."""

    file: str
    """Name in the folder."""
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChunk:
    """A part of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    extent: Extent


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor whose chunks cover it, each element once."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """Everything in a folder, by DCP's flat names."""

    tensors: dict[str, StoredTensor]
    objects: dict[str, Extent]
    paths: dict[str, tuple[str | int, ...]]
    """Where in the nested state each name belongs, in the order of the state."""


def read_contents(folder: Path) -> Contents:
    """What the metadata of a folder says, after every number in it has been checked.

    Raises:
        FormatError: it is damaged, or names what it must not; or chunks leave a gap, overlap, or
            lie outside their file.
        OSError: it cannot be read.
    """
    return _Checking(folder).contents()


class _Checking:
    """One look at one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}
        self._stored: dict[tuple[str, tuple[int, ...] | None], Record] = {}

    def contents(self) -> Contents:
        document = read_pickle(self._folder / FILE)
        self._stored = self._index(document)
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, Extent] = {}
        for name, item in self._mapping(document, "state_dict_metadata").items():
            if type(name) is not str:
                self._fail(f"a name that is no text: {name!r:.80}")
            if type(item) is TensorMetadata:
                tensors[name] = self._tensor(name, item)
            elif type(item) is BytesMetadata:
                objects[name] = self._extent(name, None)
            else:
                self._fail(f"{name!r} is a {type(item).__name__}, neither tensor nor bytes")
        paths = self._paths(document, [*tensors, *objects])
        return Contents(tensors=tensors, objects=objects, paths=paths)

    def _index(self, document: Metadata) -> dict[tuple[str, tuple[int, ...] | None], Record]:
        found: dict[tuple[str, tuple[int, ...] | None], Record] = {}
        for index, info in self._mapping(document, "storage_data").items():
            if type(index) is not Index or type(info) is not StorageInfo:
                self._fail("storage data of another kind")
            name, offset = index.fields.get("fqn"), index.fields.get("offset")
            if type(name) is not str:
                self._fail(f"a name that is no text: {name!r:.80}")
            key = name, None if offset is None else self._lengths(name, offset)
            if key in found:
                self._fail(f"{name!r} is stored twice at one place")
            found[key] = info
        return found

    def _tensor(self, name: str, item: TensorMetadata) -> StoredTensor:
        properties = item.fields.get("properties")
        dtype = properties.fields.get("dtype") if type(properties) is TensorProperties else None
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self._fail(f"{name!r} has no dtype")
        shape = self._lengths(name, item.fields.get("size"))
        places: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
        for chunk in self._list(name, item.fields.get("chunks")):
            if type(chunk) is not ChunkMetadata:
                self._fail(f"{name!r} has chunks of another kind")
            offsets = self._lengths(name, chunk.fields.get("offsets"))
            lengths = self._lengths(name, chunk.fields.get("sizes"))
            if len(offsets) != len(shape) or len(lengths) != len(shape):
                self._fail(f"{name!r} has a chunk with another number of dimensions")
            # One that several ranks list is stored once: its index is its name and place.
            places[offsets, lengths] = None
        if math.prod(shape):
            places = {place: None for place in places if math.prod(place[1])}
            if (wrong := _cover(shape, places)) is not None:
                self._fail(f"{name!r} of shape {list(shape)} {wrong}")
        else:
            places = {}
        chunks = [
            StoredChunk(offsets=offsets, shape=lengths, extent=self._extent(name, offsets))
            for offsets, lengths in places
        ]
        for chunk in chunks:
            if chunk.extent.bytes < math.prod(chunk.shape) * DTYPES[dtype].itemsize:
                self._fail(f"{name!r} has a chunk of {list(chunk.shape)} in too few bytes")
        return StoredTensor(dtype=dtype, shape=shape, chunks=tuple(chunks))

    def _extent(self, name: str, offsets: tuple[int, ...] | None) -> Extent:
        info = self._stored.get((name, offsets))
        if info is None:
            self._fail(f"{name!r} is stored nowhere" + (f" at {list(offsets)}" if offsets else ""))
        fields = info.fields
        if fields.get("transform_descriptors"):
            self._fail(
                f"{name!r} was encoded by an extension ({fields['transform_descriptors']!r:.80}); "
                "load it with DCP and save it without"
            )
        file = fields.get("relative_path")
        if type(file) is not str:
            self._fail(f"{name!r} has no file")
        check_name(file, file=str(self._folder / FILE))
        offset, size = self._lengths(name, (fields.get("offset"), fields.get("length")))
        there = self._size(file)
        if offset + size > there:
            raise FormatError(
                file=str(self._folder / file),
                reason=f"has {there} bytes, and {name!r} should end at {offset + size}; "
                "it was cut short",
            )
        return Extent(file=file, offset=offset, bytes=size)

    def _size(self, file: str) -> int:
        if file not in self._sizes:
            path = self._folder / file
            if not path.is_file():
                raise FormatError(file=str(path), reason="is missing, or no file")
            self._sizes[file] = path.stat().st_size
        return self._sizes[file]

    def _paths(self, document: Metadata, names: list[str]) -> dict[str, tuple[str | int, ...]]:
        """The place of every name; a planner that does not flatten leaves names as they are."""
        given = document.fields.get("planner_data")
        given = given if isinstance(given, dict) else {}
        known = set(names)
        ordered = [name for name in given if name in known]
        ordered += [name for name in names if name not in given]
        paths: dict[str, tuple[str | int, ...]] = {}
        for name in ordered:
            path = given.get(name, (name,))
            if not isinstance(path, (tuple, list)) or not path:
                self._fail(f"{name!r} has no place in the state")
            if not all(type(key) is str or (type(key) is int and key >= 0) for key in path):
                self._fail(f"{name!r} has a place of another kind: {path!r:.80}")
            paths[name] = tuple(path)
        return paths

    def _mapping(self, document: Metadata, field: str) -> dict[Any, Any]:
        value = document.fields.get(field)
        if not isinstance(value, dict):
            self._fail(f"it has no {field}")
        return value

    def _list(self, name: str, value: object) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            self._fail(f"{name!r} has no list of chunks")
        return list(value)

    def _lengths(self, name: str, value: object) -> tuple[int, ...]:
        if not isinstance(value, (tuple, list)) or len(value) > _MAX_DIMS:
            self._fail(f"{name!r} has something else where lengths should be")
        if not all(type(one) is int and 0 <= one < 1 << 62 for one in value):
            self._fail(f"{name!r} has lengths that are none: {value!r:.80}")
        return tuple(value)

    def _fail(self, reason: str) -> NoReturn:
        raise FormatError(file=str(self._folder / FILE), reason=reason)


def _cover(
    shape: Sequence[int], places: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
) -> str | None:
    """What is wrong with chunks that should cover a tensor, each element once; None if nothing is.

    The edges of all chunks cut the tensor into cells; a cell is in a chunk whole or not at all.
    """
    places = list(places)
    edges: list[set[int]] = [{0, length} for length in shape]
    for offsets, lengths in places:
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            if offset + length > shape[dim]:
                return f"has a chunk at {list(offsets)} that reaches beyond its end"
            edges[dim] |= {offset, offset + length}
    cuts = [sorted(edge) for edge in edges]
    if math.prod(len(cut) - 1 for cut in cuts) > _MAX_CELLS:
        return "is cut into too many pieces"
    cells = np.zeros([len(cut) - 1 for cut in cuts], np.int32)
    numbers = [{at: number for number, at in enumerate(cut)} for cut in cuts]
    for offsets, lengths in places:
        region = tuple(
            slice(numbers[dim][offset], numbers[dim][offset + length])
            for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True))
        )
        cells[region] += 1
    for wrong, what in ((cells == 0, "has a gap"), (cells > 1, "has chunks that overlap")):
        if wrong.any():
            first = np.unravel_index(int(wrong.argmax()), wrong.shape)
            return f"{what} at {[cuts[dim][int(cell)] for dim, cell in enumerate(first)]}"
    return None
