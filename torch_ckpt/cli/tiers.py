"""ROOT with its archive and its cache, as one run.

Knows what a user named and what a survey finds. Knows nothing of what commands do with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_ckpt.cli.arguments import Where
from torch_ckpt.cli.output import note
from torch_ckpt.cli.places import Damaged, NoSuchThing, Place, open_place, pick, pick_only
from torch_ckpt.errors import GenerationNotFound, StorageError
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.choose import choose
from torch_ckpt.generations.copy import lacks
from torch_ckpt.generations.tiers import Held, Survey, Tier, TierName, survey
from torch_ckpt.manifest.layout import step_of_folder
from torch_ckpt.storage.spelling import place_of
from torch_ckpt.storage.store import Store


@dataclass(frozen=True, kw_only=True)
class Found:
    """A generation in one tier."""

    tier: TierName
    store: Store
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """The places of one run, nearest first."""

    place: Place
    """ROOT, and the one folder in it that the user named, if so."""
    tiers: Sequence[Tier]

    @property
    def several(self) -> bool:
        """Whether there is more than ROOT."""
        return len(self.tiers) > 1

    @property
    def url(self) -> str:
        """What the user named as ROOT, in full."""
        return self.place.url

    def store(self, name: TierName) -> Store | None:
        """The store of a tier, None if the user named none."""
        return next((tier.store for tier in self.tiers if tier.name == name), None)

    def look(self) -> Survey:
        """What is in all of them; those that do not answer are named on stderr.

        Raises:
            StorageError: none of them answers.
        """
        found = survey(self.tiers)
        if len(found.unreachable) == len(self.tiers):
            raise StorageError("; ".join(found.unreachable.values()))
        for name, reason in found.unreachable.items():
            note(f"the {name} does not answer, so nothing is said of what it holds: {reason}")
        folder = self.place.folder
        if folder is None:
            return found
        return Survey(
            held=[one for one in found.held if one.generation.folder == folder],
            damaged=[one for one in found.damaged if one[1] == folder],
            unreachable=found.unreachable,
        )

    def pick(self, step: int | None) -> Found:
        """The generation of a step or the one to resume from, in the first tier that has it.

        Raises:
            GenerationNotFound: no tier holds one.
            Damaged: there is one, and its manifest cannot be read.
        """
        if not self.several:
            return Found(tier="primary", store=self.place.store, generation=pick(self.place, step))
        found = self.look()
        for candidate in choose(found.generations, step) or _least_bad(found, step):
            held = next(one for one in found.held if one.generation is candidate)
            return self._nearest(held)
        for _, folder, reason in found.damaged:
            if step is None or step_of_folder(folder) == step:
                raise Damaged(reason)
        raise self._nothing(found, step)

    def pick_only(self, step: int | None) -> list[Found]:
        """One generation in every tier that holds it, to be changed; never one by default.

        Raises:
            NoSuchThing: the step was left out, or has several generations, or a tier that may
                hold it does not answer.
            GenerationNotFound: there is none.
        """
        if not self.several:
            only = pick_only(self.place, step)
            return [Found(tier="primary", store=self.place.store, generation=only)]
        if self.place.folder is None and step is None:
            raise NoSuchThing("say which generation: give its STEP, or its folder as ROOT")
        found = self.look()
        if found.unreachable:
            raise NoSuchThing("it must be changed in all tiers or in none: try again later")
        held = [one for one in found.held if step is None or one.generation.step == step]
        if not held:
            raise self._nothing(found, step)
        if len(held) > 1:
            names = ", ".join(one.generation.url for one in held)
            raise NoSuchThing(
                f"step {held[0].generation.step} has {len(held)} generations; give the folder of "
                f"one of them as ROOT: {names}"
            )
        return self.copies(held[0])

    def copies(self, held: Held) -> list[Found]:
        """A generation in every tier that holds it, nearest first."""
        return [self._in(name, one) for name, one in held.tiers.items()]

    def _nearest(self, held: Held) -> Found:
        names = list(held.readable or held.tiers)
        for name in names[:-1]:
            found = self._in(name, held.tiers[name])
            # A cache need only hold the shards of its own node.
            if name != "cache" or lacks(found.store, found.generation) is None:
                return found
        return self._in(names[-1], held.tiers[names[-1]])

    def _in(self, name: TierName, generation: Generation) -> Found:
        tier = next(tier for tier in self.tiers if tier.name == name)
        whole = tier.catalog.whole(generation)
        return Found(tier=name, store=tier.store, generation=whole)

    def _nothing(self, found: Survey, step: int | None) -> GenerationNotFound:
        what = "no generation" if step is None else f"no generation of step {step}"
        near = sorted({one.step for one in found.generations}, reverse=True)
        there = f"there is step {', '.join(map(str, near[:5]))}" if near else "nothing is there"
        if len(near) > 5:
            there += f" and {len(near) - 5} more"
        places = ", ".join(tier.store.url for tier in self.tiers)
        return GenerationNotFound(f"{what} in {places}; {there}")


def open_tiers(root: str, where: Where, *, same_is_fine: bool = False) -> Tiers:
    """The tiers that the user named. With an archive or a cache, ROOT itself may be gone.

    With `same_is_fine`, ROOT may be one of the others, which is then looked at once.

    Raises:
        NoSuchThing: a place is not there, or no place for generations.
    """
    alone = where.archive is None and where.cache is None
    place = open_place(root, where.storage_options, may_lack=not alone)
    tiers = [Tier(name="primary", store=place.store)]
    if where.cache is not None:
        cache = _whole_root(where.cache, Where(), "--cache")
        tiers.insert(0, Tier(name="cache", store=cache))
    if where.archive is not None:
        archive = _whole_root(
            where.archive, Where(storage_options=where.archive_options), "--archive"
        )
        tiers.append(Tier(name="archive", store=archive))
    elif where.archive_options:
        raise NoSuchThing("--archive-option is for an archive; give --archive URL, too")
    if same_is_fine:
        tiers = list({place_of(tier.store.url): tier for tier in reversed(tiers)}.values())[::-1]
    if len({place_of(tier.store.url) for tier in tiers}) != len(tiers):
        raise NoSuchThing("ROOT, --archive and --cache must be different places")
    return Tiers(place=place, tiers=tiers)


def _whole_root(root: str, where: Where, option: str) -> Store:
    place = open_place(root, where.storage_options, may_lack=True)
    if place.folder is not None:
        raise NoSuchThing(f"{option} {root} is one generation; give the folder that holds it")
    return place.store


def _least_bad(found: Survey, step: int | None) -> list[Generation]:
    """Where all are set apart, there is no better one."""
    return found.generations[:1] if step is None else []
