"""The two documents of a generation, parts and manifest, as frozen values that check themselves.

`docs/format.md` is the normative description. Knows JSON. Knows nothing of stores or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_ckpt.manifest.digest import canonical_json, ordered_json, sha256_hex
from torch_ckpt.manifest.entries import Block, TensorEntry
from torch_ckpt.manifest.tables import BlockTable

FORMAT = "torch-ckpt/1"
ENCODED_FORMAT = "torch-ckpt/2"
"""Of a part whose blocks are encoded or lie in other generations; it has more fields."""

Json = Any
"""A value that JSON can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """One file that a document names: where it is, how long it is, and what its bytes must be."""

    name: str
    bytes: int
    sha256: str = ""
    """Empty for a shard, whose blocks carry their own digests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Borrowed:
    """A shard of an earlier generation in which blocks of this part lie."""

    step: int
    attempt: str
    folder: str
    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """The first fields of a part: whose it is, of which save, and how much it stores."""

    step: int
    attempt: str
    run: str
    rank: int
    world_size: int
    files: tuple[StoredFile, ...]
    borrowed: tuple[Borrowed, ...] = ()
    lossy: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one rank wrote in one generation."""

    step: int
    attempt: str
    run: str
    rank: int
    world_size: int
    files: tuple[StoredFile, ...]
    blocks: Sequence[Block]
    """These two lists are long: of a part that was read they are tables."""
    tensors: Sequence[TensorEntry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tensors that are stored once, such as tied weights."""
    tree: Json = None
    """The typed JSON of the whole state; rank 0's part carries it, other parts have None."""
    per_rank: Mapping[str, Json] = field(default_factory=dict)
    """Typed JSON of values that belong to this rank alone, by key path."""
    borrowed: tuple[Borrowed, ...] = ()
    bases: Sequence[Block] = ()
    """Blocks outside the raw space that others are decoded against; the base of one of them
    comes before it."""
    lossy: tuple[str, ...] = ()
    """What is lost in its blocks, one line a rule, for people."""

    @property
    def encoded(self) -> bool:
        """Whether it has blocks that only the encoded format knows."""
        # Where no block of an encoded shard paid, two may still lie in one place.
        laid = any(not file.name.endswith(".safetensors") for file in self.files)
        coded = BlockTable.of(self.blocks).coded
        return bool(laid or coded or self.borrowed or self.bases)

    def file_name(self, block: Block, folder: str) -> str:
        """The shard of a block relative to the root, for a part in `folder`."""
        if block.file < len(self.files):
            return f"{folder}/{self.files[block.file].name}"
        borrowed = self.borrowed[block.file - len(self.files)]
        return f"{borrowed.folder}/{borrowed.name}"

    def block_starts(self) -> list[int]:
        """First raw byte of every block, and the end of the last one."""
        return BlockTable.of(self.blocks).starts()

    def dump(self) -> bytes:
        """JSON in the order of the state; tensors and blocks as arrays: there can be 100,000.

        The fields of a vote come first and `per_rank` last: a coordinator reads these alone.
        """
        more = self.encoded
        borrowed = [_fields(one) for one in self.borrowed]
        return ordered_json(
            {
                "format": ENCODED_FORMAT if more else FORMAT,
                "kind": "part",
                "step": self.step,
                "attempt": self.attempt,
                "run": self.run,
                "rank": self.rank,
                "world_size": self.world_size,
                "files": [{"name": f.name, "bytes": f.bytes} for f in self.files],
                **({"borrowed": borrowed, "lossy": list(self.lossy)} if more else {}),
                "blocks": [_block(b, more) for b in self.blocks],
                **({"bases": [_block(b, more) for b in self.bases]} if more else {}),
                "tensors": [
                    {
                        "name": t.name,
                        "dtype": t.dtype,
                        "shape": t.shape,
                        "chunks": [
                            {"offsets": c.offsets, "shape": c.shape, "start": c.start}
                            for c in t.chunks
                        ],
                    }
                    for t in self.tensors
                ],
                "aliases": dict(self.aliases),
                "tree": self.tree,
                "per_rank": dict(self.per_rank),
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The document that makes a generation exist."""

    step: int
    attempt: str
    run: str
    created: str
    """UTC, ISO 8601, for people: nothing is ever chosen by it."""
    world_size: int
    parts: tuple[StoredFile, ...]
    bytes: int
    """Stored bytes of all shards."""
    parent: Mapping[str, Json] | None = None
    """Step and attempt of the generation that the run had resumed from or committed before."""
    mesh: Json = None
    bases: tuple[int, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tag to reason: permanent, suspect, damaged, aside."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    framework: Mapping[str, str] = field(default_factory=dict)

    def dump(self) -> bytes:
        """Canonical JSON that carries the SHA-256 of itself without that field."""
        return _signed(self._body())

    @property
    def sha256(self) -> str:
        """The digest that `dump` puts into the document."""
        return sha256_hex(canonical_json(self._body()))

    def with_tags(self, tags: Mapping[str, str]) -> Manifest:
        """The same manifest with exactly these tags."""
        return replace(self, tags=dict(tags))

    def without_parts(self) -> Manifest:
        """What an index keeps of it; no document, since a manifest has as many parts as ranks."""
        return replace(self, parts=())

    def _body(self) -> dict[str, Json]:
        return {
            "format": FORMAT,
            "kind": "manifest",
            "parts": [{"name": p.name, "bytes": p.bytes, "sha256": p.sha256} for p in self.parts],
            **self.facts(),
        }

    def facts(self) -> dict[str, Json]:
        """Every field as JSON, but for those that make it a document, and for the parts."""
        return {
            "step": self.step,
            "attempt": self.attempt,
            "run": self.run,
            "created": self.created,
            "world_size": self.world_size,
            "bytes": self.bytes,
            "parent": None if self.parent is None else dict(self.parent),
            "mesh": self.mesh,
            "bases": list(self.bases),
            "tags": dict(self.tags),
            "metrics": {
                name: value if math.isfinite(value) else str(value)
                for name, value in self.metrics.items()
            },
            "framework": dict(self.framework),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What an index says of one generation: its manifest, but for the parts."""

    folder: str
    manifest: Manifest
    """Without parts."""
    parts_bytes: int
    """Stored bytes of the parts, which are documents."""
    sha256: str
    """The digest that the manifest carries of itself."""


def dump_index(summaries: Iterable[Summary]) -> bytes:
    """The index of a root: canonical JSON that carries the SHA-256 of itself, as a manifest."""
    generations = [
        {
            "folder": one.folder,
            "parts_bytes": one.parts_bytes,
            "manifest_sha256": one.sha256,
            **one.manifest.facts(),
        }
        for one in summaries
    ]
    return _signed({"format": FORMAT, "kind": "index", "generations": generations})


def _block(block: Block, with_base: bool) -> dict[str, Json]:
    document: dict[str, Json] = {
        "file": block.file,
        "offset": block.offset,
        "bytes": block.bytes,
        "raw_bytes": block.raw_bytes,
        "codec": block.codec,
        "sha256": block.sha256,
        "xxh3": block.xxh3,
    }
    return {**document, "base": block.base} if with_base else document


def _fields(one: Borrowed) -> dict[str, Json]:
    return {name: getattr(one, name) for name in ("step", "attempt", "folder", "name", "bytes")}


def _signed(body: dict[str, Json]) -> bytes:
    return canonical_json({**body, "sha256": sha256_hex(canonical_json(body))})
