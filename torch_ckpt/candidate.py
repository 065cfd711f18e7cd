"""One candidate of a resume, tried by all ranks in step: all succeed, or all learn why not.

Knows ranks, generations and damage. Knows nothing of states or of what is tried next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch_ckpt.errors import (
    CkptError,
    DisagreementError,
    FormatError,
    GenerationNotFound,
    IntegrityError,
    UnexpectedFile,
)
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.load import Opened
from torch_ckpt.manifest.digest import sha256_hex
from torch_ckpt.sharding.agree import Ranks
from torch_ckpt.sharding.broadcast import PeerFailed

_Answer = TypeVar("_Answer")
Kinds = tuple[type[Exception], ...]

MALFORMED: Kinds = (IntegrityError, FormatError)
DAMAGE: Kinds = (*MALFORMED, FileNotFoundError, UnexpectedFile)
"""What reading alone may take for damage: a `state_dict` of the user's may miss files too."""


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """How one rank fared with one stage."""

    damaged: str | None = None
    place: tuple[str, int] | None = None
    """File and offset of damaged bytes."""
    failed: str | None = None
    seen: tuple[int, str] | None = None
    """Which generation this rank finds in the folder."""


class Candidate:
    """A generation in a folder, on its way into the states of all ranks."""

    def __init__(
        self, ranks: Ranks, catalog: Catalog, folder: str, *, partial: bool = False
    ) -> None:
        """`partial`: each node may have a copy of its own, with the shards of its ranks alone."""
        self._ranks, self._catalog, self._folder = ranks, catalog, folder
        self._partial = partial
        self.generation: Generation | None = None
        self.damage: Exception | None = None
        """What is wrong with it, as every rank knows by now."""

    def open(self) -> Opened:
        """Read the documents of the generation that rank 0 chose; all ranks call it together."""
        names, failure = None, None
        try:
            names = sha256_hex(repr(self._find().manifest.parts).encode())
        except Exception as error:  # the others must hear of it, whatever it is
            failure = error
        found: list[str | None] = self._ranks.gather(names)
        if failure is not None:
            raise failure
        if None in found:
            raise PeerFailed("another rank could not read the manifest")
        # Ranks that see different parts read all of theirs, and then compare what they have seen.
        together = self._ranks.world_size > 1 and len(set(found)) == 1
        return self._opened(self._ranks if together else None)

    def _opened(self, ranks: Ranks | None) -> Opened:
        generation = self.generation or self._find()
        return Opened(self._catalog.store, generation, partial=self._partial, ranks=ranks)

    def _find(self) -> Generation:
        try:
            self.generation = self._catalog.find(folder=self._folder)
        except GenerationNotFound as error:
            if self._ranks.rank == 0:
                raise
            # Not damage: that would cost everyone a generation which is there.
            raise DisagreementError(
                f"rank {self._ranks.rank} does not see {self._folder} in "
                f"{self._catalog.store.url}, which rank 0 has found there; give every rank the "
                f"same storage ({error})"
            ) from error
        return self.generation

    def stage(self, act: Callable[[], _Answer], kinds: Kinds) -> _Answer | None:
        """Do something on all ranks; None if one of them met damage, which is then known to all.

        An error that is not of `kinds` leaves on every rank: as itself where it happened, elsewhere
        as a DisagreementError that quotes it.
        """
        answer, own, mine = None, None, _Outcome()
        try:
            answer = act()
            mine = _Outcome(seen=self.generation and self.generation.id)
        except PeerFailed as error:
            own = error  # the peer's outcome says more
        except kinds as error:
            own, mine = error, self._damaged(error)
        except Exception as error:
            if not self._ranks.lost:
                self._ranks.gather(_Outcome(failed=f"{type(error).__name__}: {error}"))
            raise
        outcomes: list[_Outcome] = self._ranks.gather(mine)
        self._check(outcomes)
        for rank, outcome in enumerate(outcomes):
            if outcome.damaged is None:
                continue
            error = DisagreementError(f"rank {rank} cannot load {self._folder}: {outcome.damaged}")
            self.damage = own if own is not None and mine.damaged is not None else error
            if outcomes[0].damaged is None:
                self._confirm(rank, outcome)
            return None
        if own is not None:
            raise own
        return answer

    def _damaged(self, error: Exception) -> _Outcome:
        place = (error.file, error.offset) if isinstance(error, IntegrityError) else None
        seen = self.generation and self.generation.id
        return _Outcome(damaged=str(error), place=place, seen=seen)

    def _check(self, outcomes: Sequence[_Outcome]) -> None:
        for rank, outcome in enumerate(outcomes):
            if outcome.failed is not None:
                raise DisagreementError(f"rank {rank} cannot load {self._folder}: {outcome.failed}")
        for rank, outcome in enumerate(outcomes):
            if None not in (outcome.seen, outcomes[0].seen) and outcome.seen != outcomes[0].seen:
                raise DisagreementError(
                    f"ranks 0 and {rank} see different generations in {self._folder}; give every "
                    "rank the same root"
                )

    def _confirm(self, rank: int, outcome: _Outcome) -> None:
        """See whether rank 0 finds the damage too, which only other ranks have met.

        Raises:
            DisagreementError: it does not, so the fault is between that rank and its storage.
        """
        confirmed = None
        if self._ranks.rank == 0:
            try:
                confirmed = self._is_whole_at(outcome.place)
            except DAMAGE:
                confirmed = False
            except Exception as error:  # the others wait for an answer, whatever it is
                confirmed = f"{type(error).__name__}: {error}"
        whole = self._ranks.share(confirmed)
        if whole is False:
            return
        seen = "reads the same well" if whole is True else f"cannot tell ({whole})"
        raise DisagreementError(
            f"rank {rank} cannot load {self._folder}, but rank 0 {seen}, so it is not passed over; "
            f"look at the storage of rank {rank}: {outcome.damaged}"
        ) from (self.damage if isinstance(self.damage, CkptError) else None)

    def _is_whole_at(self, place: tuple[str, int] | None) -> bool:
        """Whether documents, and the block at a place in a shard, read well here."""
        self._find()
        opened = self._opened(None)
        if place is None:
            return True
        name, offset = place[0].split("/")[-2:], place[1]
        for reader in opened.readers:
            for index, block in enumerate(reader.part.blocks):
                if any(
                    reader.url_of(one).split("/")[-2:] == name
                    and one.offset <= offset <= one.offset + one.bytes
                    for one in (block, *reader.chain(index))
                ):
                    reader.read(index, memoryview(bytearray(block.bytes)))
        return True
