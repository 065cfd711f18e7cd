"""Which generation a run starts from, the same on every rank, stepping back over damage.

Knows the catalog, ranks and loading. Knows nothing of saving.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch_ckpt.candidate import DAMAGE, MALFORMED, Candidate
from torch_ckpt.config import Config
from torch_ckpt.errors import (
    CkptError,
    DisagreementError,
    FormatError,
    NothingUsable,
    RunBusy,
    StorageError,
)
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.choose import choose, lacking
from torch_ckpt.generations.prune import lending
from torch_ckpt.generations.retention import SET_APART
from torch_ckpt.generations.tiers import Survey, TierName
from torch_ckpt.generations.warm import Warming
from torch_ckpt.load import Opened, Reads, fit, missing_is_damage
from torch_ckpt.manifest.commit import update_tags
from torch_ckpt.reach import Option, Reach
from torch_ckpt.sharding.agree import Ranks
from torch_ckpt.staging.bind import Binding
from torch_ckpt.writer.orphan import Orphan, await_orphan

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_MEET_S = 10.0
"""How often ranks tell one another whether they still wait for a dead trainer's writer."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What rank 0 saw, and the order in which generations are tried."""

    options: Sequence[Option]
    apart: frozenset[str]
    """Folders that saves must leave as they are."""
    lent: frozenset[str]
    """Those on which other generations build, which saves must leave too."""
    unusable: Sequence[str]
    """Why what else is there cannot be used."""

    @property
    def folders(self) -> list[str]:
        """Of the options, in order."""
        return [option.folder for option in self.options]


class Resumer:
    """Chooses and loads for one run."""

    def __init__(self, config: Config, reach: Reach, ranks: Ranks) -> None:
        self._config, self._reach, self._ranks = config, reach, ranks
        self._store = reach.primary
        self._arrived = self._all_arrived = False

    def arrive(self) -> None:
        """Wait until no writer of a dead trainer works for this rank.

        Raises:
            RunBusy: a living trainer has this rank, or the writer needs too long.
        """
        if not self._arrived:
            await_orphan(self._store.url, self._ranks.rank, self._config.orphan_timeout_s)
            self._arrived = True

    def arrive_together(self) -> None:
        """Wait until that holds for all ranks, which call this together.

        Nobody waits for its peers in another collective meanwhile, whose time-out is shorter.

        Raises:
            RunBusy: on all ranks, if one of them cannot go on.
        """
        orphan = Orphan(self._store.url, self._ranks.rank, self._config.orphan_timeout_s)
        wait_s = min(_MEET_S, self._config.agree_timeout_s / 3)
        said = False
        while not self._all_arrived:
            failure: RunBusy | None = None
            try:
                self._arrived = self._arrived or orphan.gone(wait_s)
            except RunBusy as error:
                failure = error
            found = self._ranks.gather(failure or self._arrived)
            for rank, one in enumerate(found):
                if isinstance(one, RunBusy):
                    raise failure or RunBusy(f"rank {rank} cannot start: {one}")
            self._all_arrived = all(found)
            if not self._all_arrived and not said and self._ranks.rank == 0:
                said = True
                logger.warning(
                    "waiting for what earlier trainers left to be written: rank %s, for up to %g s",
                    ", ".join(str(rank) for rank, done in enumerate(found) if not done),
                    self._config.orphan_timeout_s,
                )

    def choose(self, step: int | None) -> Choice:
        """Rank 0's choice, on every rank."""
        return self._from_rank_0(lambda: self._look(step))

    def _from_rank_0(self, act: Callable[[], _Answer]) -> _Answer:
        """What rank 0 gets, or the error that it meets, on every rank."""
        answer: Any = None
        if self._ranks.rank == 0:
            try:
                answer = act()
            except CkptError as error:
                answer = error
            except Exception as error:  # the others wait for an answer, whatever it is
                reason = f"{type(error).__name__}: {error}"
                self._ranks.share(DisagreementError(f"rank 0 cannot look for one: {reason}"))
                raise
        answer = self._ranks.share(answer)
        if isinstance(answer, CkptError):
            raise answer
        return answer

    def _look(self, step: int | None) -> Choice:
        survey = self._reach.look(enough=partial(_will_do, step=step))
        committed = survey.generations
        apart = [one for one in committed if one.set_apart]
        held = {(one.generation.folder, one.generation.id): one for one in survey.held}
        reasons = []
        for tier, folder, reason in survey.damaged:
            logger.error("a %s copy is damaged and is passed over: %s (%s)", tier, folder, reason)
            if tier != "cache":
                reasons.append(f"{folder} ({reason})")
        for one in apart:
            marks = [
                f"{word}: {one.tags[tag]}" for tag, word in SET_APART.items() if tag in one.tags
            ]
            reasons.append(f"{one.folder} ({'; '.join(marks)})")
        broken = lacking(committed)
        lost = [one for one in committed if one.folder in broken and not one.set_apart]
        for one in lost if step is None else ():
            logger.error("%s is passed over: %s", one.folder, broken[one.folder])
            reasons.append(f"{one.folder} ({broken[one.folder]})")
        unreadable = [folder for tier, folder, _ in survey.damaged if tier != "cache"]
        return Choice(
            options=[
                self._reach.option(held[one.folder, one.id]) for one in choose(committed, step)
            ],
            apart=frozenset([one.folder for one in apart + lost] + unreadable),
            lent=frozenset(lending(committed)),
            unusable=reasons,
        )

    def newest(self) -> Generation | None:
        """The generation that would be tried first.

        Raises:
            NothingUsable: there are generations, and none can be used.
        """
        choice = self.choose(None)
        if choice.options:
            return self._reach.generation(choice.options[0])
        if choice.unusable:
            raise NothingUsable(root=self._reach.names, reasons=choice.unusable)
        return None

    def resume(
        self, state: Any, *, step: int | None, strict: bool
    ) -> tuple[Generation | None, set[str]]:
        """Load the best generation, and set aside what is newer than a step that was asked for.

        Returns it, None for a fresh run, and the folders that saves must leave as they are.
        Raises what `_first` raises.
        """
        choice = self.choose(step)
        generation = self._first(choice, state, step=step, strict=strict)
        apart = set(choice.apart)
        if generation is not None:
            apart |= set(choice.folders[: choice.folders.index(generation.folder)])
            if step is not None:
                apart |= set(self.set_aside(step)[0])
                apart.discard(generation.folder)
        return generation, apart | choice.lent

    def _first(
        self, choice: Choice, state: Any, *, step: int | None, strict: bool
    ) -> Generation | None:
        """Load the first candidate that all ranks can read; None if there is nothing at all.

        Raises:
            NothingUsable: there are generations, and none can be used.
            GenerationNotFound: the step that was asked for is not there.
        """
        reasons = list(choice.unusable)
        for option in choice.options:
            generation, damage = self._try_tiers(option, state, strict=strict, mark=True)
            if damage is None and generation is not None:
                self._say(generation, step)
                return generation
            logger.error("stepping back from %s: %s", option.folder, damage)
            reasons.append(f"{option.folder} ({damage})")
        if step is not None and not choice.options:
            self._from_rank_0(lambda: self._reach.find(step=step, folder=None))
        if reasons:
            raise NothingUsable(root=self._reach.names, reasons=reasons)
        return None

    def pick(self, step: int | None, folder: str | None = None) -> Option:
        """The best candidate, or the one that was asked for, as rank 0 sees it.

        Raises:
            NothingUsable: there are generations, and none can be used.
            GenerationNotFound: there is none, or none of that step.
        """
        return self._from_rank_0(lambda: self._pick(step, folder))

    def _pick(self, step: int | None, folder: str | None) -> Option:
        if folder is None:
            choice = self._look(step)
            if not choice.options and choice.unusable and step is None:
                raise NothingUsable(root=self._reach.names, reasons=choice.unusable)
            if choice.options:
                return choice.options[0]
        return self._reach.find(step=step, folder=folder)

    def load(self, option: Option, state: Any, *, strict: bool) -> Generation:
        """Fill `state` from one generation; all ranks call it together.

        Raises:
            IntegrityError: stored bytes are not the ones that were written; on the ranks that did
                not find it out themselves, DisagreementError.
            FormatError: a file of it is missing.
        """
        generation, damage = self._try_tiers(option, state, strict=strict, mark=False)
        if isinstance(damage, FileNotFoundError):
            with missing_is_damage(option.folder):
                raise damage
        if damage is not None or generation is None:
            reason = "it went away while it was opened"
            raise damage or FormatError(file=option.folder, reason=reason)
        return generation

    def _try_tiers(
        self, option: Option, state: Any, *, strict: bool, mark: bool
    ) -> tuple[Generation | None, Exception | None]:
        """Load a candidate from the nearest tier that has it whole, the same one on all ranks.

        With `mark`, a copy that turns out to be damaged is quarantined.
        """
        generation: Generation | None = None
        damage: Exception | None = None
        tiers = self._common(option)
        for place, tier in enumerate(tiers):
            last = place == len(tiers) - 1
            try:
                generation, damage = self._try(option, tier, state, strict)
            except (StorageError, DisagreementError) as error:
                if last or self._ranks.lost:
                    raise
                logger.warning("%s is not read from the %s tier: %s", option.folder, tier, error)
                continue
            if damage is None:
                break
            if tier == "cache":
                self._reach.drop_cached(option.folder)
            elif generation is not None and mark and self._ranks.rank == 0:
                self._quarantine(tier, generation, str(damage))
            if not last:
                logger.error("the %s copy of %s is damaged: %s", tier, option.folder, damage)
        return generation, damage

    def _common(self, option: Option) -> list[TierName]:
        """The tiers in which all ranks can read a candidate, nearest first."""
        tiers = list(option.tiers)
        if "cache" in tiers:
            ranks = self._ranks
            mine = self._reach.caches(option, ranks.rank, ranks.world_size)
            if not all(ranks.gather(mine)) and len(tiers) > 1:
                tiers.remove("cache")
        return tiers

    def _try(
        self, option: Option, tier: TierName, state: Any, strict: bool
    ) -> tuple[Generation | None, Exception | None]:
        """Load one candidate on all ranks; the damage if one of them found it damaged.

        An error of another kind leaves on every rank: as itself where it happened, elsewhere as
        a DisagreementError that quotes it. What can fail on one rank alone comes before all of
        them read, or after.
        """
        catalog = Catalog(self._reach.store(tier))
        candidate = Candidate(self._ranks, catalog, option.folder, partial=tier == "cache")
        opened = candidate.stage(candidate.open, DAMAGE)
        if opened is not None:
            fitted = candidate.stage(lambda: self._fit(opened, state, strict), MALFORMED)
            if fitted is not None:
                binding, reads = fitted
                warm = self._warm(opened, tier)
                with contextlib.closing(warm):
                    candidate.stage(lambda: reads.run(self._ranks, warm.take), DAMAGE)
                    if candidate.damage is None:
                        candidate.stage(binding.apply, MALFORMED)
                    if candidate.damage is None:
                        warm.finish()
        return candidate.generation, candidate.damage

    def _fit(self, opened: Opened, state: Any, strict: bool) -> tuple[Binding, Reads]:
        binding = fit(
            opened,
            state,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            strict=strict,
            allow_pickle=self._config.allow_pickle,
        )
        return binding, Reads(opened, binding.targets)

    def _warm(self, opened: Opened, tier: TierName) -> Warming:
        """What fills the cache with this rank's share while it is read elsewhere."""
        cache = self._reach.cache if tier != "cache" else None
        own = None
        if cache is not None and len(opened.parts) == self._ranks.world_size:
            own = opened.parts[self._ranks.rank]
        return Warming(self._reach.store(tier), cache, opened.generation, own)

    def _quarantine(self, tier: TierName, generation: Generation, damage: str) -> None:
        """Mark a damaged generation, so that nothing chooses it again by itself."""
        try:
            store = self._reach.store(tier)
            update_tags(store, generation.folder, add={"damaged": damage})
            self._reach.retell([generation.folder])
        except (CkptError, OSError) as refusal:
            logger.warning("could not mark %s as damaged: %s", generation.folder, refusal)

    def set_aside(self, step: int) -> tuple[list[str], set[str]]:
        """Mark what is newer than `step`: kept and listed, and not chosen by itself any more.

        Returns the folders, and those on which any generation builds.
        """
        folders, lent = self._from_rank_0(lambda: self._mark_aside(step))
        for folder in folders:
            self._reach.drop_cached(folder)
        if folders:
            logger.warning("set aside by going back to step %d: %s", step, ", ".join(folders))
        return folders, lent

    def _mark_aside(self, step: int) -> tuple[list[str], set[str]]:
        folders = []
        survey = self._reach.look()
        if (reason := survey.unreachable.get("archive")) is not None:
            raise StorageError(
                f"what is newer than step {step} cannot be set aside in the archive, which does "
                f"not answer ({reason}); try again, or leave the archive out"
            )
        for held in survey.held:
            one = held.generation
            if one.step > step and not one.set_apart:
                self._reach.mark(held, "aside", f"by going back to step {step}")
                folders.append(one.folder)
        if folders:
            self._reach.retell(folders)
        return folders, lending(survey.generations)

    def _say(self, generation: Generation, step: int | None) -> None:
        how = "as asked" if step is not None else "the newest usable generation"
        logger.info("resumed step %d from %s (%s)", generation.step, generation.url, how)
        if (lossy := generation.tags.get("lossy")) is not None:
            logger.warning("step %d was stored with a loss: %s", generation.step, lossy)


def _will_do(survey: Survey, *, step: int | None) -> bool:
    """Whether a run can start from what is known, though a tier has not answered.

    Not past damage: that tier may have a sound copy of what is damaged elsewhere.
    """
    best = next(iter(choose(survey.generations, step)), None)
    if best is None or best.set_apart or survey.damaged:
        return False
    broken = lacking(survey.generations)
    return not any(
        one.step >= best.step and ("damaged" in one.tags or one.folder in broken)
        for one in survey.generations
    )
