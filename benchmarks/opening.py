"""What it costs to open a generation of very many ranks: on each of them, and on one that is alone.

The documents are made up, and what peers would send is given: one process is one of many ranks.
DCP beside it reads its one document, which every rank does. Holds no numbers of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import machine_facts, machine_line
from table import show, write
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from watch import Watch

from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.load import Opened
from torch_ckpt.manifest.commit import parts_of, publish_manifest, publish_part
from torch_ckpt.manifest.digest import xxh3_hex
from torch_ckpt.manifest.entries import Block, Chunk, TensorEntry
from torch_ckpt.manifest.packed import pack
from torch_ckpt.manifest.schema import Manifest, Part, StoredFile
from torch_ckpt.sharding.agree import Ranks
from torch_ckpt.storage.local import LocalStore

ROWS, COLUMNS = 512, 1024
SIZE = 4 * ROWS * COLUMNS
"""Of a rank's part of every tensor: large enough that each has a block of its own."""

ATTEMPT, FOLDER = "0123abcd", "step-0000000001"
COLUMN_NAMES = ["ranks", "tensors", "who", "CPU s", "memory MB", "documents MB"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    parser.add_argument("--ranks", type=int, default=256, help="how many ranks have saved")
    parser.add_argument("--tensors", type=int, default=1000, help="tensors, shared out over all")
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--quick", action="store_true", help="few ranks: a smoke test only")
    options = parser.parse_args(arguments)
    ranks, tensors = (4, 20) if options.quick else (options.ranks, options.tensors)
    facts = machine_facts(Path.cwd())
    print(machine_line(facts), flush=True)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(folder)
        generation = made_up(store, ranks, tensors)
        documents = sum(part.bytes for part in generation.manifest.parts)
        alone = measured(lambda: Opened(store, generation), options.repeats)
        rows["alone"] = {**alone, "bytes": documents}
        among = OneOfMany(store, generation)
        one = measured(lambda: Opened(store, generation, ranks=among), options.repeats)
        rows["one of many"] = {**one, "bytes": among.sent}
    document = pickle.dumps(dcp_metadata(ranks, tensors))
    peer = measured(lambda: pickle.loads(document), options.repeats)  # noqa: S301 - its own bytes
    rows["DCP"] = {**peer, "bytes": len(document)}
    cells = [
        [str(ranks), str(tensors), name, f"{row['seconds']:.3f}"]
        + [f"{row[what] / 1e6:.0f}" for what in ("memory", "bytes")]
        for name, row in rows.items()
    ]
    show(COLUMN_NAMES, cells)
    if options.json:
        write(options.json, facts, rows, [], quick=options.quick)
    return 0


def made_up(store: LocalStore, ranks: int, tensors: int) -> Generation:
    """A generation of which there is nothing but its documents."""
    store.make_folder(FOLDER)
    parts, total = [], 0
    for rank in range(ranks):
        part = _part(rank, ranks, tensors)
        parts.append(publish_part(store, FOLDER, part))
        total += part.files[0].bytes
    manifest = Manifest(
        step=1,
        attempt=ATTEMPT,
        run="run",
        created="",
        world_size=ranks,
        parts=tuple(parts),
        bytes=total,
    )
    publish_manifest(store, FOLDER, manifest)
    return Catalog(store).find(step=1)


def _part(rank: int, ranks: int, tensors: int) -> Part:
    names = [f"model.layers.{number}.weight" for number in range(tensors)]
    return Part(
        step=1,
        attempt=ATTEMPT,
        run="run",
        rank=rank,
        world_size=ranks,
        files=(StoredFile(name=f"rank-{rank:05d}.{ATTEMPT}.blocks", bytes=tensors * SIZE),),
        blocks=tuple(_block(rank, number) for number in range(tensors)),
        tensors=tuple(
            TensorEntry(
                name=name,
                dtype="float32",
                shape=(ROWS * ranks, COLUMNS),
                chunks=(
                    Chunk(offsets=(ROWS * rank, 0), shape=(ROWS, COLUMNS), start=number * SIZE),
                ),
            )
            for number, name in enumerate(names)
        ),
        tree={name: {"$tensor": name} for name in names} if rank == 0 else None,
    )


def _block(rank: int, number: int) -> Block:
    digest = hashlib.sha256(b"%d %d" % (rank, number)).hexdigest()
    return Block(
        file=0,
        offset=number * SIZE,
        bytes=SIZE,
        raw_bytes=SIZE,
        sha256=digest,
        xxh3=digest[:16],
    )


class OneOfMany(Ranks):
    """Rank 1 of as many ranks as have saved; what the others would send is there."""

    def __init__(self, store: LocalStore, generation: Generation) -> None:
        parts = generation.manifest.parts
        self.rank, self.world_size = 1, len(parts)
        self._sent = [pack(part) for part in parts_of(store, FOLDER, parts)]
        self.sent = sum(map(len, self._sent))

    def gather(self, value: Any) -> list[Any]:
        sent: list[Any] = [(len(data), xxh3_hex(data)) for data in self._sent]
        sent[self.rank] = value
        return sent

    def broadcast(self, data: bytes | None, size: int, source: int) -> memoryview:
        return memoryview(bytearray(data or self._sent[source]))


def dcp_metadata(ranks: int, tensors: int) -> Metadata:
    """What DCP says of the same state in its one document."""
    shape, whole = torch.Size([ROWS, COLUMNS]), torch.Size([ROWS * ranks, COLUMNS])
    offsets = [torch.Size([ROWS * rank, 0]) for rank in range(ranks)]
    names = [f"model.layers.{number}.weight" for number in range(tensors)]
    return Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=torch.float32),
                size=whole,
                chunks=[ChunkStorageMetadata(at, shape) for at in offsets],
            )
            for name in names
        },
        storage_data=dict(_places(names, offsets)),
    )


def _places(
    names: Sequence[str], offsets: Sequence[torch.Size]
) -> Iterator[tuple[MetadataIndex, tuple[str, int, int]]]:
    """Where each chunk is, as its storage writer notes it: a file, an offset, a length."""
    for number, name in enumerate(names):
        for rank, at in enumerate(offsets):
            yield MetadataIndex(name, at), (f"__{rank}_0.distcp", number * SIZE, SIZE)


def measured(act: Callable[[], object], repeats: int) -> dict[str, float]:
    """CPU seconds of the quickest try, and the peak of memory of the first."""
    seconds, memory = [], 0
    for repeat in range(repeats):
        watch, began = Watch(), time.process_time()
        kept = act()
        seconds.append(time.process_time() - began)
        if repeat == 0:
            memory = watch.stop()[1]
        del kept
    return {"seconds": min(seconds), "memory": memory}


if __name__ == "__main__":
    sys.exit(main())
