"""`torch-ckpt show`: what one generation says of itself, its tensors and its objects.

Knows documents. Reads no tensor and rebuilds no value.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import click

from torch_ckpt.cli.arguments import Where, json_option, root_argument, step_argument, tier_options
from torch_ckpt.cli.output import (
    counted,
    metrics_text,
    note,
    print_json,
    print_line,
    print_table,
    size,
)
from torch_ckpt.cli.places import state_of
from torch_ckpt.cli.tiers import open_tiers
from torch_ckpt.cli.tree import Node, nodes
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.manifest.commit import read_parts
from torch_ckpt.manifest.entries import TensorEntry
from torch_ckpt.manifest.schema import Part


@click.command()
@root_argument
@step_argument
@json_option
@tier_options
def show(root: str, step: int | None, *, as_json: bool, where: Where) -> None:
    """Show what is in one generation; without STEP, the one that a run would resume from.

    Objects that were pickled are marked: reading these back can run code.
    """
    found_in = open_tiers(root, where).pick(step)
    generation = found_in.generation
    parts = read_parts(found_in.store, generation.folder, generation.manifest)
    found = _objects(parts)
    tensors = _tensors(parts, {node.entry for _, node in found if node.kind != "tensor"})
    objects = [
        {
            "path": node.path,
            "rank": rank,
            "kind": node.kind,
            "pickled": node.pickled,
            "value": node.document,
        }
        for rank, node in found
        if node.kind not in ("tensor", "per_rank")
    ]
    facts = _facts(generation)
    if as_json:
        print_json({"root": found_in.store.url, **facts, "tensors": tensors, "objects": objects})
        return
    _print(facts, tensors, [pair for pair in found if pair[1].kind not in ("tensor", "per_rank")])


def _facts(generation: Generation) -> dict[str, Any]:
    manifest = generation.manifest
    return {
        "step": generation.step,
        "folder": generation.folder,
        "state": state_of(generation),
        "created": manifest.created,
        "bytes": generation.stored_bytes,
        "world_size": manifest.world_size,
        "mesh": manifest.mesh,
        "run": manifest.run,
        "attempt": manifest.attempt,
        "parent": None if manifest.parent is None else dict(manifest.parent),
        "bases": list(manifest.bases),
        "tags": dict(manifest.tags),
        "metrics": dict(manifest.metrics),
        "framework": dict(manifest.framework),
    }


def _tensors(parts: Sequence[Part], blobs: set[str | None]) -> list[dict[str, Any]]:
    """Every tensor once, and every further name of one, in the order of the documents."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for entry in part.tensors:
            if entry.name not in blobs:
                found[entry.name] = {
                    "name": entry.name,
                    "dtype": entry.dtype,
                    "shape": list(entry.shape),
                    "bytes": math.prod(entry.shape) * entry.itemsize,
                    "stored_as": _stored_as(part, entry),
                    "tied_to": None,
                }
    for part in parts:
        for alias, target in part.aliases.items():
            if target in found:
                found[alias] = {**found[target], "name": alias, "bytes": 0, "tied_to": target}
    return list(found.values())


def _stored_as(part: Part, entry: TensorEntry) -> list[str]:
    """The codecs of the blocks that a rank holds of a tensor; `borrowed` is of an earlier step."""
    starts, found = part.block_starts(), set()
    for chunk in entry.chunks:
        first = bisect_right(starts, chunk.start) - 1
        last = bisect_left(starts, chunk.start + entry.chunk_bytes(chunk))
        for block in part.blocks[first:last]:
            found.add(block.codec if block.file < len(part.files) else f"borrowed {block.codec}")
    return sorted(found)


def _objects(parts: Sequence[Part]) -> list[tuple[int | None, Node]]:
    """Every leaf of the state, and of what belongs to one rank alone, with that rank."""
    found: list[tuple[int | None, Node]] = [
        (None, node) for node in nodes(parts[0].tree) if node.leaf
    ]
    for part in parts:
        for path, document in part.per_rank.items():
            found += [(part.rank, node) for node in nodes(document, path) if node.leaf]
    return found


def _mesh(mesh: Any) -> str:
    """As in "2 × 4 (dp, tp)"; another program may have written something else."""
    try:
        shape = " × ".join(map(str, mesh["shape"]))
        return f"{shape} ({', '.join(mesh['names'])})" if mesh["names"] else shape
    except (KeyError, TypeError):
        return str(mesh)


def _print(
    facts: Mapping[str, Any],
    tensors: Sequence[Mapping[str, Any]],
    objects: Sequence[tuple[int | None, Node]],
) -> None:
    shown = {
        **facts,
        "bytes": size(facts["bytes"]),
        "parent": _parent(facts["parent"]),
        "bases": ", ".join(map(str, facts["bases"])),
        "tags": ", ".join(f"{t} ({why})" if why else t for t, why in facts["tags"].items()),
        "metrics": metrics_text(facts["metrics"]),
        "framework": ", ".join(f"{name} {text}" for name, text in facts["framework"].items()),
    }
    shown["size"] = shown.pop("bytes")
    if (meshes := shown.pop("mesh")) is not None:
        shown["mesh"] = "; ".join(map(_mesh, meshes)) if isinstance(meshes, list) else meshes
    for name, value in shown.items():
        print_line(f"{name.replace('_', ' ') + ':':<12} {'-' if value in (None, '') else value}")
    total = sum(tensor["bytes"] for tensor in tensors)
    print_line("")
    print_line(f"{counted(len(tensors), 'tensor')}, {size(total)}")
    if tensors:
        rows = [
            [
                tensor["name"],
                tensor["dtype"],
                "x".join(map(str, tensor["shape"])) or "scalar",
                f"tied to {tensor['tied_to']}" if tensor["tied_to"] else size(tensor["bytes"]),
                ", ".join(tensor["stored_as"]),
            ]
            for tensor in tensors
        ]
        columns = ("tensor", "dtype", "shape", "size", "stored as")
        if all(tensor["stored_as"] in ([], ["raw"]) for tensor in tensors):
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        print_table(columns, rows)
    print_line("")
    print_line(counted(len(objects), "object"))
    if objects:
        rows = [
            [node.path or "state", "" if rank is None else str(rank), node.kind, node.text()]
            for rank, node in objects
        ]
        print_table(("object", "rank", "kind", "value"), rows)
    pickled = sum(node.pickled for _, node in objects)
    if pickled:
        note(
            f"{counted(pickled, 'object')} pickled: reading back needs allow_pickle=True and can "
            "run code"
        )


def _parent(parent: Mapping[str, Any] | None) -> str:
    return "" if parent is None else f"step {parent['step']}, attempt {parent['attempt']}"
