"""Real generations made from numpy arrays, without a trainer or a writer.

Knows the format. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torch_ckpt.generations.catalog import Generation
from torch_ckpt.manifest.attempts import Attempts
from torch_ckpt.manifest.blocks import Piece, cut, place, safetensors_header
from torch_ckpt.manifest.commit import publish_manifest, publish_part, write_latest
from torch_ckpt.manifest.digest import sha256_hex, xxh3_hex
from torch_ckpt.manifest.entries import Block, Chunk, TensorEntry
from torch_ckpt.manifest.layout import folder_name, shard_name
from torch_ckpt.manifest.schema import Manifest, Part, StoredFile
from torch_ckpt.storage.store import Store

Arrays = Mapping[str, np.ndarray]
BLOCK_BYTES = 4096
"""Small blocks, so that small tensors have several."""


@dataclass(frozen=True)
class Image:
    """One rank's share: what its shard holds and the part that describes it."""

    part: Part
    shard: bytes


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """A few tensors of several dtypes and shapes."""
    rng = np.random.default_rng(seed)
    return {
        "model.weight": rng.standard_normal((40, 50)).astype(np.float32),
        "model.steps": np.array(seed, dtype=np.int64),
        "model.mask": rng.integers(0, 2, 300).astype(bool),
        "model.empty": np.zeros((0, 3), dtype=np.float32),
        "optimizer.exp_avg": rng.standard_normal(3000),
    }


def image(
    tensors: Arrays,
    *,
    step: int = 1,
    attempt: str = "0123abcd",
    rank: int = 0,
    world_size: int = 1,
    **fields: Any,
) -> Image:
    """The shard and the part of one rank that holds `tensors` whole."""
    placed = place(
        Piece(name, str(value.dtype), value.shape, (0,) * value.ndim, value.shape)
        for name, value in tensors.items()
    )
    header = safetensors_header(placed)
    shard = header + b"".join(tensors[item.piece.name].tobytes() for item in placed)
    blocks = []
    for extent in cut(placed, BLOCK_BYTES):
        offset = len(header) + extent.start
        data = shard[offset : offset + extent.bytes]
        blocks.append(
            Block(
                file=0,
                offset=offset,
                bytes=len(data),
                raw_bytes=len(data),
                sha256=sha256_hex(data),
                xxh3=xxh3_hex(data),
            )
        )
    part = Part(
        step=step,
        attempt=attempt,
        run=fields.pop("run", "run-a"),
        rank=rank,
        world_size=world_size,
        files=(StoredFile(name=shard_name(rank, attempt), bytes=len(shard)),),
        blocks=tuple(blocks),
        tensors=tuple(
            TensorEntry(
                name=item.piece.name,
                dtype=item.piece.dtype,
                shape=item.piece.whole,
                chunks=(
                    Chunk(offsets=item.piece.offsets, shape=item.piece.shape, start=item.start),
                ),
            )
            for item in placed
        ),
        tree={name: {"$tensor": name} for name in tensors},
        **fields,
    )
    return Image(part, shard)


def manifest(parts: Sequence[StoredFile] = (), **fields: Any) -> Manifest:
    """A manifest with plain values for whatever is not given."""
    stored = StoredFile(name="rank-00000.0123abcd.json", bytes=10, sha256="a" * 64)
    defaults: dict[str, Any] = {
        "step": 1,
        "attempt": "0123abcd",
        "run": "run-a",
        "created": "2026-01-01T00:00:00Z",
        "world_size": max(1, len(parts)),
        "parts": tuple(parts) or (stored,),
        "bytes": 0,
    }
    return Manifest(**{**defaults, **fields})


def generation(step: int, folder: str | None = None, **fields: Any) -> Generation:
    """A generation that is nowhere: what pure rules judge."""
    folder = folder or folder_name(step)
    return Generation(
        folder=folder, url=f"/runs/{folder}", step=step, manifest=manifest(step=step, **fields)
    )


def commit(
    store: Store,
    step: int,
    *,
    ranks: int = 1,
    folder: str | None = None,
    run: str = "run-a",
    **fields: Any,
) -> Generation:
    """Write a whole generation in the order in which a save does."""
    folder, attempt = folder or folder_name(step), fields.pop("attempt", Attempts().next())
    store.make_folder(folder)
    parts, total = [], 0
    for rank in range(ranks):
        tensors = {f"{rank}.{name}": value for name, value in arrays(step + rank).items()}
        made = image(tensors, step=step, attempt=attempt, rank=rank, world_size=ranks, run=run)
        sink = store.create(f"{folder}/{made.part.files[0].name}", len(made.shard))
        sink.write_at(0, memoryview(made.shard))
        sink.finish()
        parts.append(publish_part(store, folder, made.part))
        total += len(made.shard)
    made_manifest = manifest(
        parts, step=step, attempt=attempt, run=run, bytes=total, world_size=ranks, **fields
    )
    publish_manifest(store, folder, made_manifest)
    write_latest(store, folder)
    return Generation(folder=folder, url=f"{store.url}/{folder}", step=step, manifest=made_manifest)
