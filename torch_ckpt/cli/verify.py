"""`torch-ckpt verify`: every byte of generations against their digests, with a progress bar.

Knows reports of damage. Knows nothing of how they are made.
"""

from __future__ import annotations

from typing import Any

import click

from torch_ckpt.cli.arguments import Where, json_option, root_argument, step_argument, tier_options
from torch_ckpt.cli.meter import Meter
from torch_ckpt.cli.output import counted, note, print_json, print_line, size
from torch_ckpt.cli.places import Damaged
from torch_ckpt.cli.tiers import Found, Tiers, open_tiers
from torch_ckpt.errors import GenerationNotFound
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.shards import sizes_in
from torch_ckpt.generations.verify import Damage
from torch_ckpt.generations.verify import verify as verify_generation
from torch_ckpt.manifest.layout import MANIFEST


@click.command()
@root_argument
@step_argument
@click.option("--all", "every", is_flag=True, help="Verify every generation.")
@json_option
@tier_options
def verify(
    root: str,
    step: int | None,
    *,
    every: bool,
    as_json: bool,
    where: Where,
) -> int:
    """Compare every stored byte with its digest; code 1 if anything is damaged.

    Without STEP: the generation that a run would resume from, and whether the manifests of the
    others can be read.
    """
    if every and step is not None:
        raise click.UsageError("give STEP or --all, not both", click.get_current_context())
    tiers = open_tiers(root, where)
    found, unreadable = _targets(tiers, step, every=every)
    entries = []
    with Meter() as meter:
        for one in found:
            entry = _verified(one, tiers, meter)
            if entry is not None:
                entries.append(entry)
    entries += [_unreadable(*one, several=tiers.several) for one in unreadable]
    ok = all(entry["ok"] for entry in entries)
    if as_json:
        print_json({"root": tiers.place.store.url, "ok": ok, "generations": entries})
    else:
        _print(entries)
    return 0 if ok else 1


_Unreadable = tuple[str, str, str]
"""Tier, folder and reason."""


def _targets(
    tiers: Tiers, step: int | None, *, every: bool
) -> tuple[list[Found], list[_Unreadable]]:
    """What to verify, in every tier that holds it, and folders that are damaged for certain."""
    found = tiers.look()
    damaged: list[_Unreadable] = list(found.damaged)
    if every and (found.held or damaged):
        return [copy for one in found.held for copy in tiers.copies(one)], damaged
    try:
        picked = tiers.pick(step).generation
    except Damaged:
        if step is not None:
            raise
        return [], damaged
    except GenerationNotFound:
        if step is None and damaged:
            return [], damaged
        raise
    held = [one for one in found.held if one.generation.id == picked.id]
    copies = [copy for one in held for copy in tiers.copies(one)]
    wanted = [copy for copy in copies if copy.generation.folder == picked.folder]
    if step is not None:  # of the others nobody has asked
        damaged = [one for one in damaged if one[1] == picked.folder]
    return wanted, damaged


def _verified(found: Found, tiers: Tiers, meter: Meter) -> dict[str, Any] | None:
    """What a verification says; None if a run has pruned the generation meanwhile."""
    folder, store = found.generation.folder, found.store
    shown = f"{found.tier}: {folder}" if tiers.several else folder
    report = verify_generation(store, found.generation, progress=meter.of(shown))
    damages = list(report.damages)
    if damages and not _still_there(found):
        note(f"{shown} was deleted while it was verified")
        return None
    if found.tier == "cache":  # which need only hold the shards of its own node
        there = sizes_in(store, folder)
        damages = [one for one in damages if one.file in there or one.file.endswith(".json")]
    return _entry(found, damages, report.bytes_checked, several=tiers.several)


def _still_there(found: Found) -> bool:
    try:
        Catalog(found.store).find(folder=found.generation.folder)
    except GenerationNotFound:
        return False
    except ValueError:  # its manifest is damaged too
        return True
    return True


def _entry(
    found: Found, damages: list[Damage], bytes_checked: int, *, several: bool
) -> dict[str, Any]:
    entry: dict[str, Any] = {"tier": found.tier} if several else {}
    return {
        **entry,
        "folder": found.generation.folder,
        "step": found.generation.step,
        "ok": not damages,
        "lossy": found.generation.tags.get("lossy"),
        "bytes_checked": bytes_checked,
        "damages": [
            {
                "file": damage.file,
                "offset": damage.offset,
                "tensors": list(damage.tensors),
                "reason": damage.reason,
            }
            for damage in damages
        ],
    }


def _unreadable(tier: str, folder: str, reason: str, *, several: bool) -> dict[str, Any]:
    damage = {"file": MANIFEST, "offset": 0, "tensors": [], "reason": reason}
    entry: dict[str, Any] = {"tier": tier} if several else {}
    facts = {"folder": folder, "step": None, "ok": False, "lossy": None}
    facts |= {"bytes_checked": 0, "damages": [damage]}
    return {**entry, **facts}


def _print(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        folder = f"{entry['tier']}: {entry['folder']}" if "tier" in entry else entry["folder"]
        if entry["ok"]:
            lossy = f"; lossy: {entry['lossy']}" if entry["lossy"] else ""
            print_line(f"{folder}: sound, {size(entry['bytes_checked'])} checked{lossy}")
        for damage in entry["damages"]:
            where = f"{folder}/{damage['file']} at byte {damage['offset']}"
            held = ", ".join(damage["tensors"])
            print_line(f"{where}: {damage['reason']}" + (f"; holds {held}" if held else ""))
    damaged = sum(not entry["ok"] for entry in entries)
    if damaged:
        what = f"{len(entries)} copies" if "tier" in entries[0] else None
        note(f"{damaged} of {what or counted(len(entries), 'generation')} damaged")
