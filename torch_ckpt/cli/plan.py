"""What a prune would do to each tier of a run, and the doing of it.

Knows rules and tiers. Knows nothing of output, and asks nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch_ckpt.cli.places import NoSuchThing
from torch_ckpt.cli.tiers import Tiers
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.index import forget, refresh_index
from torch_ckpt.generations.leaving import pin_for, pin_until_archived, unwanted
from torch_ckpt.generations.prune import Pinned, prune
from torch_ckpt.generations.retention import Among, Retention, Verdict
from torch_ckpt.generations.tiers import Survey, Tier

_NO_RULE = "no rule was given"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Verdicts on all generations of one tier."""

    tier: Tier
    verdicts: Sequence[Verdict]
    """Newest first."""

    @property
    def doomed(self) -> list[Verdict]:
        """What would go."""
        return [one for one in self.verdicts if not one.kept]

    @property
    def kept(self) -> list[Generation]:
        """What would stay."""
        return [one.generation for one in self.verdicts if one.kept]

    def carry_out(self, *, only: Sequence[Verdict]) -> None:
        """Delete what would go and was to go in `only`, too, which may speak of all tiers."""
        agreed = {_name(one) for one in only}
        doomed = [one.generation for one in self.doomed if _name(one) in agreed]
        if not doomed:
            return
        catalog = self.tier.catalog
        forget(self.tier.store, {one.folder for one in doomed})
        for generation in reversed(doomed):  # oldest first
            catalog.delete(generation)
        refresh_index(catalog)


def _name(verdict: Verdict) -> tuple[str, tuple[int, str]]:
    return verdict.generation.url, verdict.generation.id


def plans_for(tiers: Tiers, keep: Retention | None, keep_archive: Retention | None) -> list[Plan]:
    """A plan for each tier, nearest first; a tier without a rule keeps all.

    Raises:
        NoSuchThing: a tier does not answer, so that nobody can tell what may go.
    """
    if not tiers.several:
        (tier,) = tiers.tiers
        return [_plan(tier, keep)]
    found = tiers.look()
    if found.unreachable:
        raise NoSuchThing("nothing is deleted while a tier does not answer")
    plans = []
    for tier in tiers.tiers:
        rule: Retention | None = None
        pinned: Pinned | None = None
        if tier.name == "primary" and keep is not None:
            rule, pinned = keep, _pin(tiers, found, keep_archive)
        elif tier.name == "archive" and keep_archive is not None:
            coming = _elsewhere(found, tier)
            rule = Among(keep_archive, coming)
            dropped = _dropped(found, keep_archive)
            pinned = pin_for([one for one in coming if one.id not in dropped], found.generations)
        plan = _plan(tier, rule, pinned)
        if tier.name == "primary" and keep is not None and tiers.store("archive") is not None:
            plan = _explained(plan, _dropped(found, keep_archive))
        plans.append(plan)
    return plans


def _plan(tier: Tier, rule: Retention | None, pinned: Pinned | None = None) -> Plan:
    if rule is None:
        verdicts = [
            Verdict(generation=one, kept=True, reason=_NO_RULE) for one in tier.catalog.committed()
        ]
    else:
        verdicts = prune(tier.catalog, rule, run=None, dry_run=True, pinned=pinned)
    return Plan(tier=tier, verdicts=verdicts)


def _pin(tiers: Tiers, found: Survey, keep_archive: Retention | None) -> Pinned | None:
    archive = tiers.store("archive")
    if archive is None:
        return None
    return pin_until_archived(archive, _dropped(found, keep_archive))


def _dropped(found: Survey, keep_archive: Retention | None) -> set[tuple[int, str]]:
    return set() if keep_archive is None else unwanted(keep_archive, found.generations)


def _elsewhere(found: Survey, tier: Tier) -> tuple[Generation, ...]:
    return tuple(one.generation for one in found.held if tier.name not in one.tiers)


def _explained(plan: Plan, dropped: set[tuple[int, str]]) -> Plan:
    verdicts = []
    for one in plan.verdicts:
        if not one.kept:
            why = "that of the archive does not want it" if one.generation.id in dropped else ""
            why = f"{one.reason}, {why or 'and the archive has it'}"
            one = replace(one, reason=why)
        verdicts.append(one)
    return replace(plan, verdicts=verdicts)
