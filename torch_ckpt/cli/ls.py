"""`torch-ckpt ls`: every generation under a root, and what crashed saves left.

Knows the catalog and names. Knows nothing of what is in a generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from torch_ckpt.cli.arguments import Where, json_option, root_argument, tier_options
from torch_ckpt.cli.output import (
    counted,
    metrics_text,
    moment,
    note,
    print_json,
    print_table,
    size,
)
from torch_ckpt.cli.places import state_of
from torch_ckpt.cli.tiers import Tiers, open_tiers
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.tiers import Held, Survey, Tier
from torch_ckpt.manifest.layout import MANIFEST, is_ours, step_of_folder

_COLUMNS = ("step", "folder", "size", "world size", "tags", "metrics", "created", "state")


@click.command()
@root_argument
@json_option
@tier_options
def ls(root: str, *, as_json: bool, where: Where) -> None:
    """List the generations of a run, newest first.

    States: committed; set aside (newer than a step gone back to); quarantined (found damaged);
    damaged (its manifest cannot be read); unfinished (being saved, or left by a crash).
    With --archive or --cache: which tiers hold each, and what is not archived yet.
    """
    tiers = open_tiers(root, where)
    found = tiers.look()
    rows = [_committed(one, tiers) for one in found.held]
    for name, folder, reason in found.damaged:
        tier = next(tier for tier in tiers.tiers if tier.name == name)
        rows.append(_other(tier, folder, "damaged", reason, several=tiers.several))
    rows += _unfinished(tiers, found)
    unarchived = _unarchived(tiers, found)
    if as_json:
        document: dict[str, Any] = {"root": tiers.place.store.url, "generations": rows}
        if tiers.several:
            document["unreachable"] = dict(found.unreachable)
            document["not_archived"] = unarchived and [one.folder for one in unarchived]
        print_json(document)
        return
    if rows:
        columns = (*_COLUMNS, "tiers") if tiers.several else _COLUMNS
        print_table(columns, [_cells(row) for row in rows], right=("step", "size", "world size"))
    else:
        note(f"no generation in {tiers.url}")
    if unarchived:
        total = size(sum(one.stored_bytes for one in unarchived))
        oldest = unarchived[-1].step
        count = counted(len(unarchived), "generation")
        note(f"not archived: {count} ({total}), the oldest of step {oldest}")
    for name, folder, reason in found.damaged:
        shown = f"{name}: {folder}" if tiers.several else folder
        note(f"{shown} is damaged: {reason}")


def _committed(held: Held, tiers: Tiers) -> dict[str, Any]:
    generation = held.generation
    manifest = generation.manifest
    row: dict[str, Any] = {
        "step": generation.step,
        "folder": generation.folder,
        "bytes": generation.stored_bytes,
        "world_size": manifest.world_size,
        "tags": dict(generation.tags),
        "metrics": dict(manifest.metrics),
        "created": manifest.created,
        "state": state_of(generation),
        "reason": None,
    }
    return {**row, "tiers": list(held.tiers)} if tiers.several else row


def _other(
    tier: Tier, folder: str, state: str, reason: str | None, *, several: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step_of_folder(folder),
        "folder": folder,
        "bytes": sum(entry.bytes for entry in tier.store.entries(folder)),
        "world_size": None,
        "tags": {},
        "metrics": {},
        "created": None,
        "state": state,
        "reason": reason,
    }
    return {**row, "tiers": [tier.name]} if several else row


def _unfinished(tiers: Tiers, found: Survey) -> list[dict[str, Any]]:
    """Folders that a save or a copy began, and in which there is no manifest."""
    rows = []
    for tier in tiers.tiers:
        if tier.name in found.unreachable:
            continue
        known = {one.tiers[tier.name].folder for one in found.held if tier.name in one.tiers}
        known |= {folder for name, folder, _ in found.damaged if name == tier.name}
        folders = tier.store.folders() if tiers.place.folder is None else [tiers.place.folder]
        for folder in folders:
            if folder in known:
                continue
            names = [entry.name for entry in tier.store.entries(folder)]
            begun = step_of_folder(folder) is not None or any(map(is_ours, names))
            # A folder that one tier lacks is named by the user in another one.
            if begun and MANIFEST not in names and (names or tiers.place.folder is None):
                rows.append(_other(tier, folder, "unfinished", None, several=tiers.several))
    return rows


def _unarchived(tiers: Tiers, found: Survey) -> list[Generation] | None:
    """What the archive lacks, newest first; None where there is no archive, or no answer."""
    if tiers.store("archive") is None or "archive" in found.unreachable:
        return None
    return [one.generation for one in found.held if "archive" not in one.tiers]


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [
        "" if row["step"] is None else str(row["step"]),
        row["folder"],
        size(row["bytes"]),
        "" if row["world_size"] is None else str(row["world_size"]),
        ",".join(row["tags"]),
        metrics_text(row["metrics"]),
        moment(row["created"] or ""),
        row["state"],
    ]
    return [*cells, ",".join(row["tiers"])] if "tiers" in row else cells
