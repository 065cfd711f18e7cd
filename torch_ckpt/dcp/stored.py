"""One generation as DCP sees it: keys, chunks, and the boxes of them that a plan asks for.

Knows documents and DCP's metadata. Knows nothing of plans as a whole or of planners.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from torch_ckpt.dcp.nesting import keys_of
from torch_ckpt.dcp.regions import Box
from torch_ckpt.errors import FormatError
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.read import BlockReader
from torch_ckpt.manifest.commit import read_parts
from torch_ckpt.manifest.entries import Chunk, TensorEntry
from torch_ckpt.staging.bind import names_in, per_rank_in
from torch_ckpt.staging.objects import Json
from torch_ckpt.storage.store import Store


class StoredState:
    """The documents of a generation, read and checked.

    Raises:
        IntegrityError: a part is not the one that the manifest names.
        FormatError: a document cannot be read or is missing.
    """

    def __init__(self, store: Store, generation: Generation) -> None:
        self.generation = generation
        try:
            parts = read_parts(store, generation.folder, generation.manifest)
        except FileNotFoundError as error:
            raise FormatError(file=generation.url, reason=f"lacks a part ({error})") from error
        try:
            self.keys = keys_of(parts[0].tree, where=generation.url)
        except (TypeError, LookupError, AttributeError) as error:
            reason = f"its tree is malformed ({error!r})"
            raise FormatError(file=generation.url, reason=reason) from error
        self._per_rank = [part.per_rank for part in parts]
        self._aliases = {name: of for part in parts for name, of in part.aliases.items()}
        self._chunks: dict[str, list[tuple[BlockReader, TensorEntry, Chunk]]] = {}
        self._entries: dict[str, TensorEntry] = {}
        for part in parts:
            reader = BlockReader(store, generation.folder, part)
            for entry in part.tensors:
                self._entries[entry.name] = entry
                self._chunks.setdefault(entry.name, []).extend(
                    (reader, entry, chunk) for chunk in entry.chunks
                )
        self._by_place: dict[str, dict[tuple[int, ...], tuple[BlockReader, Chunk]]] = {}

    def metadata(self) -> Metadata:
        """What DCP's load planners plan from."""
        kinds: dict[str, STORAGE_TYPES] = {}
        for name, key in self.keys.items():
            if key.tensor is None:
                kinds[name] = BytesStorageMetadata()
                continue
            entry = self._entry(key.tensor)
            kinds[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
                size=torch.Size(entry.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape))
                    for _, _, chunk in self._chunks[entry.name]
                ],
            )
        return Metadata(kinds, planner_data={name: key.path for name, key in self.keys.items()})

    def box(self, item: ReadItem, target: torch.Tensor) -> Box:
        """What a read item asks for, on its way into a tensor."""
        key = self.keys[item.storage_index.fqn]
        entry = self._entry(str(key.tensor))
        places = self._by_place.get(entry.name)
        if places is None:
            # An empty chunk may lie where another one begins, and nobody asks for it.
            places = self._by_place[entry.name] = {
                chunk.offsets: (reader, chunk)
                for reader, _, chunk in self._chunks[entry.name]
                if 0 not in chunk.shape
            }
        reader, chunk = places[tuple(item.storage_index.offset or ())]
        return Box(reader, chunk, getattr(torch, entry.dtype), tuple(item.storage_offsets), target)

    def names_behind(self, key: str, rank: int) -> list[str]:
        """The tensors that a value's document needs."""
        return [name for document in self.documents(key, rank) for name in names_in(document)]

    def documents(self, key: str, rank: int) -> list[Json]:
        """A value's document, and those of this rank's own that it refers to."""
        document = self.keys[key].document
        own = self.per_rank(rank)
        return [document, *(own[path] for path in per_rank_in(document) if path in own)]

    def per_rank(self, rank: int) -> Mapping[str, Json]:
        """The documents of a rank's own values."""
        return self._per_rank[rank] if rank < len(self._per_rank) else {}

    def empty(self, name: str) -> torch.Tensor:
        """Memory for a whole tensor."""
        entry = self._entry(name)
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))

    def whole(self, name: str, target: torch.Tensor) -> Iterator[Box]:
        """All chunks of a tensor, each on its way into its place."""
        entry = self._entry(name)
        for reader, _, chunk in self._chunks[entry.name]:
            region = target
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
                region = region.narrow(dim, offset, size)
            origin = (0,) * len(chunk.shape)
            yield Box(reader, chunk, target.dtype, origin, region)

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(self._aliases.get(name, name))
        if entry is None:
            raise FormatError(
                file=self.generation.url, reason=f"its tree names {name!r}, which no part holds"
            )
        return entry
