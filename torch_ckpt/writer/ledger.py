"""What a writer knows of generations on their way to the archive: how far each is, and who waits.

Knows ids, tags and the archive's rule. Knows nothing of stores, of ranks, or of how a generation
travels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from torch_ckpt.generations.catalog import Generation, newest_first
from torch_ckpt.generations.leaving import bases_first, unwanted
from torch_ckpt.generations.retention import Retention

_REMEMBERED = 256
"""Archived generations whose summaries are kept to judge the rest by."""

_REFUSED = 8
"""Refusals that are looked at again: each costs a listing a minute."""

Id = tuple[int, str]
"""Step and attempt."""


class Ledger:
    """The generations of one run, as one rank sees them. Threads may share it."""

    def __init__(
        self, rule: Retention | None, builds_on: Callable[[Generation], Collection[Id]]
    ) -> None:
        """`rule` is the archive's, None keeps all; `builds_on` asks parts what one builds on."""
        self._rule, self._builds_on = rule, builds_on
        self._known: dict[Id, Generation] = {}
        self._base: Id | None = None  # of the save that is being written, perhaps
        self._archived: set[Id] = set()
        self._sent: set[Id] = set()
        self._passed: set[Id] = set()
        """Those that will never be archived, and why is said."""
        self._refused: dict[Id, Generation] = {}
        self._given_up: set[Id] = set()
        """Those that the user removed before the archive had them."""
        self._bases: dict[Id, frozenset[Id]] = {}
        """What some build on, where the steps that manifests tell are of several attempts."""
        self._lock = threading.RLock()

    # What happens to a generation, in this order.

    def learn(self, one: Generation) -> None:
        """It is committed."""
        with self._lock:
            self._known.setdefault(one.id, one)

    def adopt(self, found: Iterable[Generation]) -> None:
        """Earlier runs committed these; of what is known already, more is known."""
        with self._lock:
            self._known = {**{one.id: one for one in found}, **self._known}

    def hold(self, one: Generation) -> None:
        """The next save may build on it, and on none before it."""
        self._base = one.id

    def sent(self, one: Generation) -> None:
        """This rank's share of it is in the archive."""
        with self._lock:
            self._sent.add(one.id)

    def over(self, one: Generation, *, archived: bool) -> bool:
        """It is archived as far as this rank can tell, or never will be.

        Returns whether the user gave it up meanwhile, so that it may go now.
        """
        with self._lock:
            (self._archived if archived else self._passed).add(one.id)
            self._sent.discard(one.id)
            self._bases.pop(one.id, None)
            # A summary stays, to judge others by.
            self._known[one.id] = replace(one, manifest=replace(one.manifest, parts=()))
            was_given_up = one.id in self._given_up
            self._given_up.discard(one.id)
            return archived and was_given_up

    def give_up(self, one: Generation) -> None:
        """The user removed it, and the archive is to have it first."""
        with self._lock:
            self._given_up.add(one.id)  # not its folder, which may soon be another's

    def refused(self, one: Generation) -> None:
        """Nobody will send it, as far as this rank can tell; that was noted for rank 0."""
        with self._lock:
            self._refused[one.id] = one
            for key in sorted(self._refused)[:-_REFUSED]:
                del self._refused[key]

    def take_up_again(self, one: Generation) -> None:
        """Rank 0 found that its share can be sent."""
        with self._lock:
            self._refused.pop(one.id, None)
            self._passed.discard(one.id)
            self._known[one.id] = one

    def doubted(self) -> list[Generation]:
        """Those that this rank refused, of which rank 0 may find that it was wrong."""
        with self._lock:
            return list(self._refused.values())

    def forget(self) -> None:
        """Keep what is needed to judge by: in a long run that is not everything."""
        with self._lock:
            over = [key for key in sorted(self._known) if key in self._archived | self._passed]
            for key in over[:-_REMEMBERED]:
                self._known.pop(key, None)
                self._passed.discard(key)

    # Who waits for what.

    def known(self) -> list[Generation]:
        """All that is remembered."""
        with self._lock:
            return list(self._known.values())

    def waiting(self) -> list[Generation]:
        """Committed and wanted in the archive, and not there: newest first, after its bases.

        What is damaged is sent to nobody; what was set aside is, since it is kept as it is.
        """
        with self._lock:
            known, over = dict(self._known), self._archived | self._passed
        found = [known[key] for key in self._wanted(known) - over]
        found = [one for one in found if "damaged" not in one.tags]
        return bases_first(sorted(found, key=newest_first))

    def dropped(self) -> list[Generation]:
        """Not there yet, and the archive's rule would drop it at once."""
        with self._lock:
            known, over = dict(self._known), self._archived | self._passed
        return [known[key] for key in known.keys() - self._wanted(known) - over]

    def is_archived(self, key: Id) -> bool:
        """Whether the archive has it."""
        return key in self._archived

    def is_sent(self, key: Id) -> bool:
        """Whether this rank has done its share of it."""
        return key in self._sent

    def pinned(self, one: Generation) -> str | None:
        """Why the primary tier must not let go of a generation yet."""
        if one.id == self._base:
            return "the next save may build on it"
        if one.id in self._archived:
            return None
        with self._lock:
            known = {**self._known, one.id: one}
        if one.id not in self._wanted(known):
            return None  # the archive would drop it at once
        return "the archive does not have it yet"

    def lends(self, one: Generation) -> bool:
        """Whether others may build on a generation."""
        return any(one.step in other.manifest.bases for other in self.known())

    def lost_base(self, one: Generation) -> int | None:
        """A step that a generation builds on and that the archive will never have.

        Raises what `builds_on` raises.
        """
        for key in sorted(self._bases_of(one)):
            base = self._known.get(key)
            if key in self._passed or (base is not None and "damaged" in base.tags):
                return key[0]
        return None

    def has_bases(self, one: Generation) -> bool:
        """Whether the archive has what a generation builds on.

        Raises what `builds_on` raises.
        """
        there = {key[0] for key in self._bases_of(one) if key in self._archived}
        return there.issuperset(one.manifest.bases)

    def _bases_of(self, one: Generation) -> Collection[Id]:
        """What a generation builds on, of what is known.

        Its manifest tells steps; parts are read only if one of those was saved more than once.
        """
        if (found := self._bases.get(one.id)) is not None:
            return found
        steps = set(one.manifest.bases)
        with self._lock:
            seen = self._known.keys() | self._archived | self._passed
        found = frozenset(key for key in seen if key[0] in steps)
        if len(found) > len({step for step, _ in found}):
            found = self._bases[one.id] = frozenset(self._builds_on(one))
        return found

    def _wanted(self, known: Mapping[Id, Generation]) -> set[Id]:
        """The ids that the archive's rule keeps, were they all there."""
        if self._rule is None:
            return set(known)
        return set(known) - unwanted(self._rule, list(known.values()))
