"""`torch-ckpt prefetch`: the generation that a run would resume from, into a folder of this node.

Knows arguments and the order of candidates. Knows nothing of how bytes travel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click

from torch_ckpt.cli.arguments import Where, json_option, root_argument, tier_options
from torch_ckpt.cli.meter import Meter
from torch_ckpt.cli.output import counted, note, print_json, print_line, size
from torch_ckpt.cli.places import NoSuchThing
from torch_ckpt.cli.tiers import Found, Tiers, open_tiers
from torch_ckpt.errors import FormatError, IntegrityError
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.choose import choose
from torch_ckpt.generations.copy import Copied, copy_generation
from torch_ckpt.storage.spelling import same_place
from torch_ckpt.storage.store import Store, open_store

_PARTS_AT_ONCE = 4


@click.command()
@root_argument
@click.option("--to", "to", metavar="PATH", help="The cache to fill; --cache means the same.")
@click.option("--step", type=click.IntRange(min=0), help="This step and no other.")
@json_option
@tier_options
def prefetch(root: str, *, to: str | None, step: int | None, as_json: bool, where: Where) -> None:
    """Copy the newest usable generation of ROOT, or of its archive, into a local cache.

    Every block is verified as it arrives. Started again, it goes on where it was stopped.
    """
    path = to or where.cache
    if path is None:
        raise click.UsageError("give --to PATH, the cache to fill", click.get_current_context())
    target = _cache(path)
    tiers = open_tiers(root, replace(where, cache=None))
    if any(same_place(tier.store.url, target.url) for tier in tiers.tiers):
        raise NoSuchThing(f"{path} is ROOT or the archive itself; give the folder of a cache")
    refusal: Exception | None = None
    for found in _candidates(tiers, step):
        try:
            copied = _copy(found, target)
        except (IntegrityError, FormatError, FileNotFoundError) as error:
            refusal = refusal or error
            note(f"{found.generation.url} is damaged, the next one is tried: {error}")
            continue
        _say(found, target, copied, as_json=as_json)
        return
    raise refusal or NoSuchThing(f"there is no usable generation in {tiers.url}")


def _cache(path: str) -> Store:
    if "://" in path and not path.startswith(("file:", "local:")):
        raise NoSuchThing(f"{path} is a URL; a cache is a folder of this machine")
    store = open_store(path)
    if os.path.lexists(store.url) and not os.path.isdir(store.url):
        raise NoSuchThing(f"{path} is a file; give a folder")
    return store


def _candidates(tiers: Tiers, step: int | None) -> Iterator[Found]:
    """Every copy that may be tried, best first."""
    survey = tiers.look()
    chosen = choose(survey.generations, step)
    if not chosen:
        yield tiers.pick(step)  # which says what there is
        return
    for generation in chosen:
        held = next(one for one in survey.held if one.generation is generation)
        yield from tiers.copies(held)


def _copy(found: Found, target: Store) -> Copied:
    generation = found.generation
    try:
        there = Catalog(target).find(folder=generation.folder)
    except (FileNotFoundError, FormatError, IntegrityError):
        there = None
    if there is not None and "damaged" in there.tags:
        Catalog(target).delete(there)  # found damaged in the cache: what is there is worthless
    with Meter() as meter:
        return copy_generation(
            found.store,
            target,
            generation,
            parts_at_once=_PARTS_AT_ONCE,
            progress=meter.counting(generation.folder, generation.stored_bytes),
        )


def _say(found: Found, target: Store, copied: Copied, *, as_json: bool) -> None:
    generation = found.generation
    if as_json:
        document: dict[str, Any] = {
            "root": found.store.url,
            "tier": found.tier,
            "to": target.url,
            "folder": generation.folder,
            "step": generation.step,
            "bytes": generation.stored_bytes,
            "files_copied": copied.files,
            "bytes_copied": copied.bytes,
        }
        print_json(document)
        return
    what = f"{counted(copied.files, 'file')}, {size(copied.bytes)}"
    if copied.bytes < generation.stored_bytes:
        what += f"; {size(generation.stored_bytes - copied.bytes)} was there"
    print_line(f"step {generation.step} of {found.store.url} -> {target.url} ({what})")
