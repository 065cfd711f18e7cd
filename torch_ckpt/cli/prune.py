"""`torch-ckpt prune`: delete what a rule drops, or what crashes left, after asking.

Knows verdicts and litter. Knows nothing of how rules decide.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from torch_ckpt.cli.arguments import Where, json_option, root_argument, tier_options
from torch_ckpt.cli.cost import Prices, cost_option, costs, print_costs
from torch_ckpt.cli.output import counted, note, print_json, print_line, print_table, size
from torch_ckpt.cli.places import NoSuchThing, Place
from torch_ckpt.cli.plan import Plan, plans_for
from torch_ckpt.cli.tiers import open_tiers
from torch_ckpt.generations.litter import litter as litter_in
from torch_ckpt.generations.litter import sweep
from torch_ckpt.generations.retention import Verdict, parse_rule
from torch_ckpt.manifest.layout import step_of_folder
from torch_ckpt.writer.orphan import is_sent_to, writer_of


@click.command()
@root_argument
@click.option(
    "--keep",
    metavar="RULES",
    help="What stays, such as last=3,every=1000,best=val_loss:2:min; one rule is enough to stay.",
)
@click.option("--keep-archive", metavar="RULES", help="What stays in the archive.")
@cost_option
@click.option("--litter", is_flag=True, help="Remove files that crashed saves left.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and delete nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@tier_options
def prune(
    root: str,
    *,
    keep: str | None,
    keep_archive: str | None,
    prices: Prices,
    litter: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    where: Where,
) -> int:
    """Delete the generations that no rule keeps, and say why each stays or goes.

    Whatever is permanent, set aside or quarantined stays, and so does the newest usable one. With
    --archive, a generation leaves ROOT only once the archive has it whole, or if --keep-archive
    does not want it. With --litter: files of saves that never committed.
    """
    if keep is None and keep_archive is None and not (litter or prices):
        raise click.UsageError(
            "give --keep RULES, such as last=3, or --litter, or both", click.get_current_context()
        )
    if keep_archive is not None and where.archive is None:
        raise click.UsageError(
            "--keep-archive is for an archive; give --archive URL, too",
            click.get_current_context(),
        )
    rule = None if keep is None else parse_rule(keep)
    rule_archive = None if keep_archive is None else parse_rule(keep_archive)
    tiers = open_tiers(root, where)
    place = tiers.place
    if place.folder is not None:
        raise NoSuchThing(f"{place.url} is one generation; give the run's folder, which holds it")
    judged = rule is not None or rule_archive is not None
    plans = plans_for(tiers, rule, rule_archive) if judged or prices else []
    left = _litter(place) if litter else {}
    doomed = [verdict for plan in plans for verdict in plan.doomed]
    kept = {plan.tier.name: plan.kept for plan in plans}
    found = costs(prices, kept, archive=where.archive is not None)
    if not as_json:
        _print_plan(plans, left, several=tiers.several, judged=judged, swept=litter)
        print_costs(found)
    deleted = False
    if (doomed or left) and not dry_run:
        if not _confirmed(doomed, left, yes=yes, as_json=as_json):
            note("nothing was deleted")
            return 0
        if left:
            _require_quiet(place, left)
        if doomed:
            # Judged again: what was tagged or committed since the question stays.
            for now in plans_for(tiers, rule, rule_archive):
                now.carry_out(only=doomed)
        for folder in left:
            sweep(place.store, folder)
        deleted = True
    if as_json:
        document = _document(place, plans, left, several=tiers.several, deleted=deleted)
        print_json({**document, "cost": found} if prices else document)
    elif deleted:
        print_line(f"deleted {_summary(doomed, left)}")
    return 0


def _litter(place: Place) -> dict[str, list[str]]:
    """Folder to the files in it that no manifest needs; a folder of ours may be empty."""
    found: dict[str, list[str]] = {}
    for folder in place.store.folders():
        names = [name.rpartition("/")[2] for name in litter_in(place.store, [folder])]
        empty = step_of_folder(folder) is not None and not place.store.entries(folder)
        if names or empty:
            found[folder] = names
    return found


def _require_quiet(place: Place, left: Mapping[str, Sequence[str]]) -> None:
    """Refuse while the run is being written: what looks left over may be a save under way."""
    ranks = {0}
    for names in left.values():
        ranks |= {int(rank) for name in names if (rank := name[5:].partition(".")[0]).isdigit()}
    for one in place.scan()[0]:
        ranks |= set(range(one.manifest.world_size))
    for rank in sorted(ranks):
        writer = writer_of(place.store.url, rank)
        if writer is not None or is_sent_to(place.store.url, rank):
            who = f"process {writer}" if writer else "a process"
            raise NoSuchThing(
                f"{who} is writing {place.store.url}; its files are no litter: wait until it has "
                "ended"
            )


def _confirmed(
    doomed: Sequence[Verdict], left: Mapping[str, Sequence[str]], *, yes: bool, as_json: bool
) -> bool:
    if yes:
        return True
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            f"would delete {_summary(doomed, left)} and cannot ask here; "
            "add --yes, or --dry-run to see what goes",
            click.get_current_context(),
        )
    if left:
        note("make sure that no other machine is saving to this run now")
    return click.confirm(f"delete {_summary(doomed, left)}?", err=True)


def _print_plan(
    plans: Sequence[Plan],
    left: Mapping[str, Sequence[str]],
    *,
    several: bool,
    judged: bool,
    swept: bool,
) -> None:
    rows = _rows(plans)
    if rows:
        columns = ["step", "folder", "size", "verdict", "reason"]
        cells = [
            [str(step), one.generation.folder, size(one.generation.stored_bytes), word, one.reason]
            for step, _, one, word in rows
        ]
        if several:
            columns.insert(3, "tier")
            for row, (_, plan, _, _) in zip(cells, rows, strict=True):
                row.insert(3, plan.tier.name)
        print_table(columns, cells, right=("step", "size"))
    elif judged:
        note("there is no generation")
    for folder, names in left.items():
        for name in names or [""]:
            print_line(f"litter: {folder}/{name}")
    if swept and not left:
        note("there is no litter")


def _rows(plans: Sequence[Plan]) -> list[tuple[int, Plan, Verdict, str]]:
    """Every verdict, newest first, tiers in reading order."""
    rows = [
        (one.generation.step, plan, one, "keep" if one.kept else "delete")
        for plan in plans
        for one in plan.verdicts
    ]
    return sorted(rows, key=lambda row: (-row[0], row[2].generation.folder))


def _summary(doomed: Sequence[Verdict], left: Mapping[str, Sequence[str]]) -> str:
    parts = []
    if doomed:
        total = sum(one.generation.stored_bytes for one in doomed)
        parts.append(f"{counted(len(doomed), 'generation')} ({size(total)})")
    if left:
        files = sum(map(len, left.values()))
        parts.append(f"{counted(files, 'file')} in {counted(len(left), 'folder')} of litter")
    return " and ".join(parts)


def _document(
    place: Place,
    plans: Sequence[Plan],
    left: Mapping[str, Sequence[str]],
    *,
    several: bool,
    deleted: bool,
) -> dict[str, Any]:
    return {
        "root": place.store.url,
        "deleted": deleted,
        "verdicts": [
            {
                **({"tier": plan.tier.name} if several else {}),
                "step": step,
                "folder": one.generation.folder,
                "bytes": one.generation.stored_bytes,
                "kept": one.kept,
                "reason": one.reason,
            }
            for step, plan, one, _ in _rows(plans)
        ],
        "litter": [f"{folder}/{name}" for folder, names in left.items() for name in names or [""]],
    }
