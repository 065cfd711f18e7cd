"""The tiers that a run can read: what they hold together, and what to believe of one that is down.

Knows tiers and documents. Knows nothing of states, or of what is loaded from where.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch_ckpt.errors import (
    CkptError,
    FormatError,
    GenerationNotFound,
    IntegrityError,
    StorageError,
)
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.copy import lacks
from torch_ckpt.generations.index import refresh_index
from torch_ckpt.generations.tiers import (
    Enough,
    Held,
    Survey,
    Tier,
    TierName,
    answer_in_time,
    same_generation,
    survey,
)
from torch_ckpt.manifest.commit import read_part, update_tags
from torch_ckpt.manifest.layout import part_name
from torch_ckpt.storage.store import Store

logger = logging.getLogger(__name__)

_FINDING_ORDER: tuple[TierName, ...] = ("primary", "archive", "cache")
"""Who is asked which generation a name means; where it is then read is another question."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A generation that may be loaded, and where it can be read, nearest first."""

    folder: str
    attempt: str
    tiers: tuple[TierName, ...]


class Reach:
    """Every tier of one run; the primary one is always among them."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)
        self._stores = {tier.name: tier.store for tier in tiers}

    @property
    def primary(self) -> Store:
        """Where saves go."""
        return self._stores["primary"]

    @property
    def cache(self) -> Store | None:
        """This node's own; None without one."""
        return self._stores.get("cache")

    @property
    def names(self) -> str:
        """All of them, for a message."""
        return ", ".join(tier.store.url for tier in self.tiers)

    def store(self, name: TierName) -> Store:
        """The store of a tier."""
        return self._stores[name]

    def look(self, enough: Enough | None = None) -> Survey:
        """What the tiers hold.

        A cache or an archive that does not answer is passed over while another tier has something:
        an archive has nothing newer than the primary tier, unless that was lost. With `enough` it
        is passed over sooner (`survey`).

        Raises:
            StorageError: the primary tier did not answer; or the archive, and there is nothing
                elsewhere, which is no proof that the run is a fresh one.
        """
        found = survey(self.tiers, enough=enough)
        for name, reason in found.unreachable.items():
            if name == "primary" or (name == "archive" and not found.held):
                raise StorageError(f"the {name} tier does not answer: {reason}")
            logger.warning("the %s tier is passed over, it does not answer: %s", name, reason)
        return self._without_strangers(found)

    def _without_strangers(self, found: Survey) -> Survey:
        """The same, but for what a cache has of another run: its folder may have served that one.

        Runs are told apart by what the other tiers hold; where those hold nothing, nobody can.
        """
        runs = {one.generation.manifest.run for one in found.held if _is_shared(one)}
        own: list[Held] = []
        for one in found.held:
            if _is_shared(one):
                own.append(one)
                continue
            told = one.generation.url, one.generation.manifest.run
            if runs and one.generation.manifest.run not in runs:
                logger.warning("%s is of another run (%s) and is passed over", *told)
                continue
            own.append(one)
            if not runs:
                logger.warning(
                    "%s is in the cache alone; if run %s is not this one, give this one a cache "
                    "of its own",
                    *told,
                )
        return replace(found, held=own)

    def generations(self) -> list[Generation]:
        """What the tiers that all ranks share hold, newest first, where it is nearest there."""
        found = []
        for held in self.look().held:
            shared: list[TierName] = [name for name in held.tiers if name != "cache"]
            if shared:
                found.append(replace(held.generation, url=held.tiers[shared[0]].url))
        return found

    def option(self, held: Held) -> Option:
        """A generation of a survey as something to load."""
        one = held.generation
        return Option(folder=one.folder, attempt=one.manifest.attempt, tiers=held.readable)

    def find(self, *, step: int | None, folder: str | None) -> Option:
        """The generation of a folder, or else of a step, wherever it is.

        Raises:
            StorageError: the primary tier did not answer; or the archive, and no other has it.
            FormatError, IntegrityError: its manifest is damaged, and no other tier has it.
            GenerationNotFound: there is none; the message says what there is.
        """
        refusal: GenerationNotFound | None = None
        failure: CkptError | None = None
        # The cache comes last: it may hold what had this folder before.
        for tier in sorted(self.tiers, key=lambda tier: _FINDING_ORDER.index(tier.name)):
            try:
                found = tier.catalog.find(step=step, folder=folder)
            except GenerationNotFound as error:
                refusal = refusal or error
                continue
            except (StorageError, FormatError, IntegrityError) as error:
                if tier.name == "primary" and isinstance(error, StorageError):
                    raise
                failure = failure or error
                logger.error("the %s tier is passed over: %s", tier.name, error)
                continue
            if tier.name == "cache" and not self._holds(found):
                continue
            names: list[TierName] = [one.name for one in self.tiers if self._has(one, found)]
            return Option(folder=found.folder, attempt=found.manifest.attempt, tiers=tuple(names))
        raise failure or refusal or GenerationNotFound(f"no generation in {self.names}")

    def _holds(self, generation: Generation) -> bool:
        """Whether a generation that only the cache has is of this run, as far as one can tell."""
        return any(same_generation(one.generation, generation) for one in self.look().held)

    def _has(self, tier: Tier, generation: Generation) -> bool:
        def find() -> Generation:
            return tier.catalog.find(folder=generation.folder)

        try:
            found = find() if tier.name == "primary" else answer_in_time(find)
        except (GenerationNotFound, CkptError):
            return False  # the generation is read where it was found
        return found.id == generation.id

    def generation(self, option: Option) -> Generation:
        """The description of an option, from the nearest tier that is the same for all ranks."""
        shared: list[TierName] = [name for name in option.tiers if name != "cache"]
        name = (*shared, *option.tiers)[0]
        return Catalog(self.store(name)).find(folder=option.folder)

    def caches(self, option: Option, rank: int, world_size: int) -> bool:
        """Whether this node's cache has what this rank needs of a generation.

        That is this rank's own share if there are as many ranks as when it was saved, and
        everything otherwise.
        """
        store = self.cache
        if store is None or "cache" not in option.tiers:
            return False
        try:
            found = Catalog(store).find(folder=option.folder)
            if found.manifest.attempt != option.attempt or "damaged" in found.tags:
                return False
            if found.manifest.world_size != world_size:
                return lacks(store, found) is None
            own = next(p for p in found.manifest.parts if p.name == part_name(rank, option.attempt))
            part = read_part(store, option.folder, own)
            files = [file.name for file in (*part.files, *part.borrowed)]
            return lacks(store, found, files) is None
        except (CkptError, OSError, StopIteration) as error:
            logger.info("the cached copy of %s is not used: %s", option.folder, error)
            return False

    def drop_cached(self, folder: str) -> None:
        """Forget this node's copy of a generation; a failure is a warning."""
        if self.cache is None:
            return
        catalog = Catalog(self.cache)
        try:
            catalog.delete(catalog.find(folder=folder))
        except GenerationNotFound:
            return
        except (CkptError, OSError) as error:
            logger.warning("the cached copy of %s stays: %s", folder, error)

    def retell(self, folders: Sequence[str]) -> None:
        """Tags were changed in these folders: indexes of remote tiers must say so."""
        for tier in self.tiers:
            if tier.name != "cache":
                refresh_index(tier.catalog, changed=folders)

    def mark(self, held: Held, tag: str, reason: str) -> None:
        """Tag a generation in every tier that all ranks share.

        Raises:
            StorageError: one of them refused.
        """
        for name in held.tiers:
            if name != "cache":
                update_tags(self.store(name), held.generation.folder, add={tag: reason})


def _is_shared(held: Held) -> bool:
    """Whether a tier that all ranks share has it."""
    return any(name != "cache" for name in held.tiers)
