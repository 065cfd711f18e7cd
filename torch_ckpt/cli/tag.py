"""`torch-ckpt tag` and `untag`: say of a generation that it is permanent, suspect, damaged, aside.

Knows tags. Knows nothing of what follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from torch_ckpt.cli.arguments import Where, json_option, root_argument, split_step, tier_options
from torch_ckpt.cli.output import note, print_json, print_line
from torch_ckpt.cli.places import NoSuchThing
from torch_ckpt.cli.tiers import Found, Tiers, open_tiers
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.index import refresh_index
from torch_ckpt.manifest.commit import update_tags

_MEANINGS = {
    "permanent": "is never pruned",
    "suspect": "is marked for people",
    "damaged": "is quarantined: no run resumes from it by itself",
    "aside": "is set aside: no run resumes from it by itself",
}


@click.command()
@root_argument
@click.argument("words", nargs=-1, metavar="[STEP] TAG")
@click.option("--reason", default="", help="Why, for whoever reads it later.")
@json_option
@tier_options
def tag(
    root: str,
    words: tuple[str, ...],
    *,
    reason: str,
    as_json: bool,
    where: Where,
) -> None:
    """Give a generation a tag.

    permanent: never pruned. damaged, aside: no run resumes from it by itself. suspect and any
    other word: a mark for people.
    """
    step, name = split_step(words, "TAG")
    if not name or not name.isprintable() or any(char in name for char in " ,="):
        raise NoSuchThing(f"{name!r} is no tag, which is one word")
    tiers = open_tiers(root, where)
    found = tiers.pick_only(step)
    _leave_lossy_alone(name)
    if name not in _MEANINGS:
        note(f"{name} is a mark for people only; known tags: {', '.join(_MEANINGS)}")
    lossy = found[0].generation.tags.get("lossy")
    if name == "permanent" and lossy is not None:
        raise NoSuchThing(
            f"{found[0].generation.url} is stored with a loss ({lossy}), and what is permanent is "
            "not; tag a step that has no tag `lossy`, or save one with tags=('permanent',)"
        )
    tags = _update(found, add={name: reason})
    if as_json:
        print_json(_document(tiers, found, tags))
    else:
        meaning = _MEANINGS.get(name, f"is tagged {name}")
        print_line(f"{found[0].generation.folder} {meaning}{_tiers_text(tiers, found)}")


@click.command()
@root_argument
@click.argument("words", nargs=-1, metavar="[STEP] TAG")
@json_option
@tier_options
def untag(root: str, words: tuple[str, ...], *, as_json: bool, where: Where) -> None:
    """Take a tag of a generation away."""
    step, name = split_step(words, "TAG")
    tiers = open_tiers(root, where)
    found = tiers.pick_only(step)
    _leave_lossy_alone(name)
    there = {word for one in found for word in one.generation.tags}
    if name not in there:
        listed = ", ".join(sorted(there)) or "none"
        raise NoSuchThing(f"{found[0].generation.url} has no tag {name!r}; its tags: {listed}")
    tags = _update(found, drop=[name])
    if as_json:
        print_json(_document(tiers, found, tags))
    else:
        folder = found[0].generation.folder
        print_line(f"{folder} is no longer tagged {name}{_tiers_text(tiers, found)}")


def _leave_lossy_alone(name: str) -> None:
    """What is stored says whether it is lossy; without the tag it could be made permanent."""
    if name == "lossy":
        raise NoSuchThing(
            "the tag lossy says how a generation is stored, so it is not yours to set"
        )


def _update(
    found: Sequence[Found], *, add: Mapping[str, str] | None = None, drop: Sequence[str] = ()
) -> dict[str, str]:
    """Change the tags in every tier; all tags that it has now in any of them."""
    tags: dict[str, str] = {}
    for one in found:
        folder = one.generation.folder
        tags |= update_tags(one.store, folder, add=add or {}, drop=drop).tags
        refresh_index(Catalog(one.store), changed=[folder])
    return tags


def _tiers_text(tiers: Tiers, found: Sequence[Found]) -> str:
    return f" ({', '.join(one.tier for one in found)})" if tiers.several else ""


def _document(tiers: Tiers, found: Sequence[Found], tags: Mapping[str, str]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "root": tiers.place.store.url,
        "folder": found[0].generation.folder,
        "step": found[0].generation.step,
        "tags": dict(tags),
    }
    if tiers.several:
        document["tiers"] = [one.tier for one in found]
    return document
