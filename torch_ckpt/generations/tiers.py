"""Which tiers hold which generations: several roots looked at as one.

The archive and the cache are roots of the same format as the primary one, so a generation is the
same wherever its step, attempt and folder are. Knows catalogs. Knows nothing of copying between
tiers, or of which copies are sound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from torch_ckpt.errors import StorageError, UnexpectedFile
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.manifest.layout import LATEST, NOTE_LIMIT_BYTES
from torch_ckpt.storage.store import Store

if TYPE_CHECKING:
    from concurrent.futures import Future

TierName = Literal["cache", "primary", "archive"]

READING_ORDER: tuple[TierName, ...] = ("cache", "primary", "archive")
"""Where a generation is looked for first: the nearest place."""

PATIENCE_S = 5.0
"""How long a cache or an archive may give no sign of life while another tier would do."""

_Answer = TypeVar("_Answer")


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


Enough = Callable[[Survey], bool]
"""Whether what was found so far will do, whatever the tiers hold that did not answer yet."""


def survey(
    tiers: Sequence[Tier], *, enough: Enough | None = None, patience_s: float = PATIENCE_S
) -> Survey:
    """One look at every tier, all at once; a tier that does not answer is named, never empty.

    A generation that was set aside in the primary or the archive is aside as a whole; `damaged`
    speaks for one copy, and for the generation where no other copy is sound. Other tags in the
    cache count only where no other tier holds it.

    Every tier is waited for as long as its own store goes on trying. But with `enough`, a cache or
    archive that has answered nothing at all for `patience_s` counts as one that does not answer,
    once `enough` says of the others that they will do. One that is only slow is waited for.
    """
    ordered = sorted(tiers, key=lambda tier: READING_ORDER.index(tier.name))
    if len(ordered) < 2:
        return _united({tier.name: _scan(tier) for tier in ordered})
    from concurrent.futures import ThreadPoolExecutor  # a writer without tiers does not need it

    pool = ThreadPoolExecutor(2 * len(ordered), thread_name_prefix="ckpt-survey")
    try:
        began = time.monotonic()
        scans: dict[TierName, Future[_Answered]] = {}
        scans.update((tier.name, pool.submit(_scan, tier)) for tier in ordered)
        if enough is not None:
            signs: dict[TierName, Future[bool]] = {}
            signs.update((t.name, pool.submit(_lives, t)) for t in ordered if t.name != "primary")
            if (primary := scans.get("primary")) is not None:
                primary.result()
            silent = _silent(scans, signs, began + patience_s)
            heard: dict[TierName, _Answered] = {}
            heard.update((name, scans[name].result()) for name in scans if name not in silent)
            if silent and enough(_united(heard)):
                error = StorageError(f"it gave no sign of life for {patience_s:g} s")
                return _united({**heard, **dict.fromkeys(silent, error)})
        return _united({name: scan.result() for name, scan in scans.items()})
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # who is silent is asked until it gives up


def answer_in_time(ask: Callable[[], _Answer], patience_s: float = PATIENCE_S) -> _Answer:
    """What `ask` returns or raises, if that comes in time.

    Raises:
        StorageError: it does not.
    """
    from concurrent.futures import ThreadPoolExecutor, wait

    pool = ThreadPoolExecutor(1, thread_name_prefix="ckpt-ask")
    try:
        asked = pool.submit(ask)
        if not wait([asked], patience_s).done:
            raise StorageError(f"it did not answer for {patience_s:g} s")
        return asked.result()
    finally:
        pool.shutdown(wait=False)


def same_generation(one: Generation, other: Generation) -> bool:
    """Whether two descriptions, of two tiers, are of one generation."""
    return _identity(one) == _identity(other)


_Answered: TypeAlias = "tuple[list[Generation], list[tuple[str, str]]] | StorageError"


def _united(scans: Mapping[TierName, _Answered]) -> Survey:
    """What several tiers said, in reading order, as one survey."""
    found: dict[tuple[object, ...], dict[TierName, Generation]] = {}
    damaged: list[tuple[TierName, str, str]] = []
    unreachable: dict[TierName, str] = {}
    for name, answer in scans.items():
        if isinstance(answer, StorageError):
            unreachable[name] = str(answer)
            continue
        committed, unreadable = answer
        damaged.extend((name, folder, reason) for folder, reason in unreadable)
        for one in committed:
            found.setdefault(_identity(one), {})[name] = one
    held = [_held(copies) for copies in found.values()]
    return Survey(held=sorted(held, key=_newest_first), damaged=damaged, unreachable=unreachable)


def _silent(
    scans: Mapping[TierName, Future[_Answered]],
    signs: Mapping[TierName, Future[bool]],
    deadline: float,
) -> set[TierName]:
    """The tiers that have answered nothing by the deadline; the others have told all they hold."""
    from concurrent.futures import FIRST_COMPLETED, wait

    silent: set[TierName] = set()
    for name, sign in signs.items():
        either: list[Future[Any]] = [scans[name], sign]
        wait(either, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
        if sign.done() and sign.result():
            wait([scans[name]])
        elif not wait([scans[name]], max(0.0, deadline - time.monotonic())).done:
            silent.add(name)
    return silent


def _lives(tier: Tier) -> bool:
    """Whether a tier answers a request of the smallest kind, whatever it answers."""
    try:
        tier.store.get(LATEST, limit=NOTE_LIMIT_BYTES)
    except (FileNotFoundError, UnexpectedFile):
        return True
    except StorageError:
        return False
    return True


def _scan(tier: Tier) -> _Answered:
    try:
        return tier.catalog.scan()
    except StorageError as error:
        return error


def _identity(one: Generation) -> tuple[object, ...]:
    # Step, attempt and folder are the name; the rest tells a planted copy from the real one. Bytes
    # do not: a tier may have it in a codec of its own.
    manifest = one.manifest
    return one.step, manifest.attempt, one.folder, manifest.run, manifest.world_size


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
