"""Which tiers hold which generations: several roots looked at as one.

The archive and the cache are roots of the same format as the primary one, so a generation is the
same wherever its step, attempt and folder are. Knows catalogs. Knows nothing of copying between
tiers, or of which copies are sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch_ckpt.errors import StorageError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.storage.store import Store

TierName = Literal["cache", "primary", "archive"]

READING_ORDER: tuple[TierName, ...] = ("cache", "primary", "archive")
"""Where a generation is looked for first: the nearest place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """A place for generations, and what it is for."""

    name: TierName
    store: Store

    @property
    def catalog(self) -> Catalog:
        """The generations that this tier holds."""
        return Catalog(self.store)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One generation, and every tier that holds it."""

    generation: Generation
    """The description in which the tags of the tiers are united; its URL is where to read it."""
    tiers: Mapping[TierName, Generation]
    """The description in each tier that holds it, in reading order."""

    @property
    def readable(self) -> tuple[TierName, ...]:
        """The tiers to read it from, in order: a copy found damaged only if there is no other."""
        names: list[TierName] = list(self.tiers)
        sound: list[TierName] = []
        sound.extend(name for name in names if "damaged" not in self.tiers[name].tags)
        return tuple(sound or names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What several tiers hold together."""

    held: list[Held]
    """Newest first."""
    damaged: list[tuple[TierName, str, str]]
    """Tier, folder and reason of each manifest that cannot be read."""
    unreachable: dict[TierName, str] = field(default_factory=dict)
    """Tiers that did not answer, and why: nothing is known of what these hold."""

    @property
    def generations(self) -> list[Generation]:
        """Every generation once, newest first, tags united."""
        return [one.generation for one in self.held]


def survey(tiers: Sequence[Tier]) -> Survey:
    """One look at every tier, all at once; a tier that does not answer is named, never empty.

    A generation that was set aside in the primary or the archive is aside as a whole; `damaged`
    speaks for one copy, and for the generation where no other copy is sound. Other tags in the
    cache count only where no other tier holds it.
    """
    ordered = sorted(tiers, key=lambda tier: READING_ORDER.index(tier.name))
    found: dict[tuple[object, ...], dict[TierName, Generation]] = {}
    damaged: list[tuple[TierName, str, str]] = []
    unreachable: dict[TierName, str] = {}
    for tier, answer in zip(ordered, _scans(ordered), strict=True):
        if isinstance(answer, StorageError):
            unreachable[tier.name] = str(answer)
            continue
        committed, unreadable = answer
        damaged.extend((tier.name, folder, reason) for folder, reason in unreadable)
        for one in committed:
            found.setdefault(_identity(one), {})[tier.name] = one
    held = [_held(copies) for copies in found.values()]
    return Survey(held=sorted(held, key=_newest_first), damaged=damaged, unreachable=unreachable)


def same_generation(one: Generation, other: Generation) -> bool:
    """Whether two descriptions, of two tiers, are of one generation."""
    return _identity(one) == _identity(other)


_Scan = tuple[list[Generation], list[tuple[str, str]]]


def _scans(tiers: Sequence[Tier]) -> list[_Scan | StorageError]:
    if len(tiers) < 2:
        return [_scan(tier) for tier in tiers]
    from concurrent.futures import ThreadPoolExecutor  # a writer without tiers does not need it

    with ThreadPoolExecutor(len(tiers), thread_name_prefix="ckpt-survey") as pool:
        return list(pool.map(_scan, tiers))


def _scan(tier: Tier) -> _Scan | StorageError:
    try:
        return tier.catalog.scan()
    except StorageError as error:
        return error


def _identity(one: Generation) -> tuple[object, ...]:
    # Step, attempt and folder are the name; the rest tells a planted copy from the real one.
    manifest = one.manifest
    return one.step, manifest.attempt, one.folder, manifest.run, manifest.world_size, manifest.bytes


def _held(copies: Mapping[TierName, Generation]) -> Held:
    speaking = [one for name, one in copies.items() if name != "cache"] or list(copies.values())
    sound = [one for one in copies.values() if "damaged" not in one.tags]
    tags: dict[str, str] = {}
    for one in speaking:
        for tag, reason in one.tags.items():
            if tag != "damaged" or not sound:
                tags[tag] = tags.get(tag) or reason
    held = Held(generation=speaking[0], tiers=copies)
    # One that was read rather than found in an index knows its parts.
    whole = [one for one in (*speaking, *copies.values()) if one.indexed is None]
    described = (whole or speaking)[0]
    nearest = copies[held.readable[0]]
    united = replace(described, url=nearest.url, manifest=described.manifest.with_tags(tags))
    return replace(held, generation=united)


def _newest_first(held: Held) -> tuple[object, ...]:
    one = held.generation
    return -one.step, one.folder, one.manifest.attempt
