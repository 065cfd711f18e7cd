"""When a generation may leave a tier: once the next one has it whole, or does not want it.

Knows verdicts and stores. Knows nothing of who copies generations, or when.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.copy import lacks
from torch_ckpt.generations.prune import Pinned, base_steps
from torch_ckpt.generations.retention import Retention
from torch_ckpt.storage.store import Store


def unwanted(rule: Retention, generations: Sequence[Generation]) -> set[tuple[int, str]]:
    """The ids of those that a tier's own rule drops, judged over `generations` of all tiers."""
    verdicts = rule.judge(generations)
    needed = base_steps([v.generation for v in verdicts if v.kept], generations)
    return {
        verdict.generation.id
        for verdict in verdicts
        if not verdict.kept and verdict.generation.step not in needed
    }


def bases_first(ordered: Sequence[Generation]) -> list[Generation]:
    """The same order, but what others among them build on comes before these."""
    by_step: dict[int, list[Generation]] = {}
    for one in ordered:
        by_step.setdefault(one.step, []).append(one)
    placed: dict[str, Generation] = {}
    for one in ordered:
        needed = base_steps([one], ordered)  # whole chains; what is needed is of an earlier step
        for step in sorted(needed):
            placed.update((base.folder, base) for base in by_step.get(step, ()))
        placed[one.folder] = one
    return list(placed.values())


def pin_for(coming: Sequence[Generation], known: Sequence[Generation]) -> Pinned:
    """What `prune` asks in a tier that some generations have yet to reach, after their bases.

    A newer one that stands alone may be there before them, and the tier's own rule sees no more.
    """
    needed = base_steps(coming, known)

    def pinned(one: Generation) -> str | None:
        if one.step not in needed:
            return None
        return f"step {needed[one.step]}, which is on its way, needs it as a base"

    return pinned


def pin_until_archived(archive: Store, unwanted: Collection[tuple[int, str]] = ()) -> Pinned:
    """What `prune` asks before a generation leaves the tier in front of `archive`.

    An archive that does not answer raises its StorageError from there, so nothing is deleted.
    """

    def pinned(one: Generation) -> str | None:
        if one.id in unwanted:
            return None
        missing = lacks(archive, one)
        return None if missing is None else f"not archived: {missing}"

    return pinned
