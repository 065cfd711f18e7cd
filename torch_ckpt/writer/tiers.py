"""The other tiers of a run, served by one thread of its writer: the cache and the archive.

Follows each save until it is committed, completes the node's cached copy, promotes what the archive
should have, newest first, and lets the primary tier go of what has arrived. A tier that is down
costs a line in the log a minute and a name in a list for each generation that waits. Knows the
order of the work. Knows nothing of sockets, slabs or messages, and leaves to `ledger` who waits.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from torch_ckpt.errors import ArchiveTaken, CkptError, GenerationNotFound, ServerBusy
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.index import write_index
from torch_ckpt.generations.leaving import pin_for
from torch_ckpt.generations.prune import delete_unlent, prune
from torch_ckpt.generations.retention import Retention, from_json
from torch_ckpt.manifest.schema import Manifest
from torch_ckpt.storage.limit import TokenBucket
from torch_ckpt.storage.store import Store, open_store
from torch_ckpt.writer.cache import Cache
from torch_ckpt.writer.follow import Follower, generation_of
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.ledger import Ledger
from torch_ckpt.writer.orphan import claim_tier
from torch_ckpt.writer.promote import Promoter, PromotionRefused
from torch_ckpt.writer.setbacks import Setbacks
from torch_ckpt.writer.tier_options import TierOptions

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_POLL_S = 2.0
"""How often a rank looks whether its peers have sent their shares."""
_LONGEST_PAUSE_S = 60.0
_ABANDONED_S = 86_400.0
"""No upload of a shard takes a day: one that is so old was cut, and its generation is gone."""
_TICK_S = 0.05
_STOP_S = 3.0
"""A promotion may be cut anywhere, and somebody may wait for this writer to end."""


class _Stopped(Exception):
    """Raised in the middle of a promotion that must end now."""


class Tiers:
    """Serves the tiers beside the primary one for one rank."""

    def __init__(
        self,
        options: TierOptions,
        *,
        rank: int,
        primary: Callable[[], Store],
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        """`report` hears of generations that are archived, or never will be."""
        self.options, self._rank = options, rank
        self._open_primary, self._report = functools.cache(primary), report
        self.cache = Cache(open_store(options.cache)) if options.cache is not None else None
        rules = (options.keep, options.keep_archive)
        self._keep, self._keep_archive = (None if one is None else from_json(one) for one in rules)
        self._promoter: Promoter | None = None
        self._untidy: Promoter | None = None
        """One whose archive may hold what killed writers left."""
        self._bucket = TokenBucket(options.bandwidth_limit)
        self._ledger = Ledger(self._keep_archive, self._builds_on)
        self._setbacks = Setbacks()
        self._refused: set[str] = set()
        """Runs of which it is said that the archive is not theirs."""
        self._adopted = False
        self._lock = threading.RLock()
        self._pruning = threading.Lock()
        self._wake, self._stopping, self._idle = (threading.Event() for _ in range(3))
        self._follower = Follower(
            rank=rank,
            primary=primary,
            committed=self._learned,
            gone=self._gone,
            over=self._wake.set,
        )
        places = [place for place in (options.archive, options.cache) if place is not None]
        self._claims = [claim_tier(place, rank) for place in places]
        self._thread = threading.Thread(target=self._run, name="ckpt-tiers", daemon=True)
        self._thread.start()

    # What the writer says; from its own threads.

    def voted(self, job: Job, manifest: Manifest, primary: Store, *, held: bool = False) -> None:
        """This rank's share is durable, on rank 0 committed; a `held` snapshot is the next base."""
        with self._lock:
            if self._rank == 0:
                found = generation_of(primary, job.folder, manifest)
                self._ledger.learn(found)
                if held:
                    self._ledger.hold(found)
            self._follower.voted(job)
            self._idle.clear()
        self._wake.set()

    def pinned(self, generation: Generation) -> str | None:
        """Why the primary tier must not let go of a generation yet."""
        if self.options.archive is None:
            return None  # then nothing is pruned while a save is being written
        return self._ledger.pinned(generation)

    def prune_primary(self, primary: Store, rule: Retention, run: str) -> None:
        """Let the primary tier go of what its rule drops and the archive has or does not want."""
        with self._pruning:
            prune(
                Catalog(primary),
                rule,
                run=run,
                pinned=self.pinned,
                elsewhere=lambda one: self._ledger.is_archived(one.id),
                over=lambda key: True,
            )

    def let_go(self, store: Store, generation: Generation) -> bool:
        """Whether a generation that the user gave up may be deleted now.

        If not, it goes once the archive has it.
        """
        if store.url != self._open_primary().url:
            return True
        with self._lock:  # the archive may get it just now
            if self.pinned(generation) is None:
                return True
            self._ledger.give_up(generation)
            return False

    def finish(self, hurried: Callable[[], bool]) -> None:
        """The trainer has ended: go on for a while, unless somebody waits for this writer."""
        deadline = time.monotonic() + self.options.timeout_s
        while not self._idle.is_set() and time.monotonic() < deadline and not hurried():
            self._idle.wait(_TICK_S)
        self._stopping.set()
        self._wake.set()
        self._follower.stop()
        self._thread.join(_STOP_S)  # a request that hangs has a deadline of its own
        if self.cache is not None:
            self.cache.close()
        for claim in filter(None, self._claims):
            claim.close()
        waiting = [one.step for one in self._waiting()]
        if waiting and self._rank == 0:
            logger.warning(
                "step %s is not in %s yet; the next run with this archive sends it",
                ", ".join(map(str, waiting[:8])),
                self.options.archive,
            )

    # The thread.

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            try:
                longest = _POLL_S if self._round() else _LONGEST_PAUSE_S
                rests = longest > _POLL_S and not self._ledger.doubted()
                pause = longest if rests else min(pause * 2, longest)
                self._setbacks.round_went()
            except _Stopped:
                return
            except Exception as error:  # whatever a backend raises: the tiers must not be given up
                pause = self._setbacks.round_failed(error)
                self._complain(error, pause)
                if isinstance(error, ServerBusy):
                    self._stopping.wait(pause)  # nothing new is a reason to ask sooner
                    pause = _FIRST_PAUSE_S
            if self._wake.wait(pause):
                pause = _FIRST_PAUSE_S
            self._wake.clear()

    def _round(self) -> bool:
        """Do what can be done now; whether more is to be done that somebody else must do first."""
        primary = self._open_primary()
        if self.options.archive is not None:
            self._promote(primary)
        with self._lock:
            busy = self._follower.follows or bool(self._waiting())
            if not busy:
                self._idle.set()
        self._tidy()
        return busy

    def _learned(self, primary: Store, found: Generation) -> None:
        """A save of this rank is committed."""
        self._ledger.learn(found)
        self._wake.set()
        if self.cache is not None:
            self.cache.seal(primary, found)

    def _gone(self, attempt: str) -> None:
        if self._rank != 0:
            reason = "it was not committed, or was removed before it was promoted"
            self._report({"event": "archived", "attempt": attempt, "reason": reason})

    def _promote(self, primary: Store) -> None:
        promoter = self._promoter
        if promoter is None:
            url, options = str(self.options.archive), self.options.archive_options
            archive = open_store(url, options, unhurried=True)
            promoter = self._promoter = self._untidy = Promoter(
                primary,
                archive,
                rank=self._rank,
                world_size=self.options.world_size,
                pace=self._pace,
                codec=self.options.codec,
            )
        self._adopt(primary, promoter)
        for one in self._ledger.doubted():
            if not promoter.is_noted(one):
                self._ledger.take_up_again(one)
        for one in self._setbacks.begin(self._waiting()):
            if self._stopping.is_set():
                raise _Stopped
            try:
                self._take_on(promoter, one)
            except (_Stopped, ServerBusy):
                raise
            except PromotionRefused as refusal:
                if refusal.damage:
                    logger.error("step %d is damaged and is not promoted: %s", one.step, refusal)
                reason = f"it is damaged: {refusal}" if refusal.damage else f"{refusal}"
                self._over(one, reason=reason)
                if refusal.damage and self._rank != 0:
                    self._ledger.refused(one)
                self._setbacks.went()
            except Exception as error:  # whatever a backend raises: the others have their turn
                if self._setbacks.failed(one, error):
                    break
            else:
                self._setbacks.went()
        self._ledger.forget()
        if (held_back := self._setbacks.end()) is not None:
            self._complain(*held_back)

    def _adopt(self, primary: Store, promoter: Promoter) -> None:
        """Once: take up what earlier runs committed and did not promote."""
        if self._adopted:
            return
        self._ledger.adopt(Catalog(primary).committed())
        self._adopted = True

    def _tidy(self) -> None:
        """Once, and last: nobody waits for it, and an archive that is down takes its time."""
        promoter, self._untidy = self._untidy, None
        if promoter is not None and self._rank == 0:
            promoter.tidy_old(_ABANDONED_S)

    def _take_on(self, promoter: Promoter, one: Generation) -> None:
        """One generation: this rank's share, and on rank 0 the commit once all are there."""
        try:
            one = Catalog(promoter.primary).whole(one)  # an index does not name its parts
        except GenerationNotFound as error:
            raise PromotionRefused(f"{error}", damage=False) from error
        try:
            promoter.claim(one.manifest.run)
        except ArchiveTaken as error:
            if error.run not in self._refused:
                self._refused.add(error.run)
                logger.error("%s", error)
                facts = {"archive": error.archive, "owner": error.owner, "run": error.run}
                self._report({"event": "taken", **facts})
            self._over(one, reason=str(error))
            return
        if not self._ledger.is_sent(one.id):
            if promoter.has(one):
                self._over(one)
                return
            if (lost := self._ledger.lost_base(one)) is not None:
                self._over(one, reason=f"it builds on step {lost}, which is not archived")
                return
            promoter.send(one, lends=self._ledger.lends(one))
            self._ledger.sent(one)
        if self._rank != 0:
            self._over(one)
        elif promoter.complete(one) and self._ledger.has_bases(one):  # else in a later round
            promoter.commit(one)
            promoter.tidy(one)
            self._over(one)
            logger.info("step %d is archived in %s", one.step, promoter.archive.url)
            self._prune(promoter, one.manifest.run)

    def _builds_on(self, one: Generation) -> frozenset[tuple[int, str]]:
        return frozenset() if self._promoter is None else self._promoter.builds_on(one)

    def _prune(self, promoter: Promoter, run: str) -> None:
        """Let both tiers go of what they may; a failure is a warning."""

        def prune_archive(archive: Store) -> None:
            if self._keep_archive is not None:
                # What the primary tier has is perhaps on its way: other ranks send it, too.
                coming = {one.id: one for one in self._waiting()}
                over = lambda key: key not in coming  # noqa: E731
                pinned = pin_for([*coming.values()], self._ledger.known())
                prune(Catalog(archive), self._keep_archive, run=run, over=over, pinned=pinned)
            write_index(Catalog(archive))

        def prune_primary(primary: Store) -> None:
            if self._keep is not None:
                self.prune_primary(primary, self._keep, run)

        for store, duty in (
            (promoter.archive, prune_archive),
            (promoter.primary, prune_primary),
        ):
            try:
                duty(store)
            except (CkptError, OSError) as error:
                logger.warning("%s was not pruned: %s", store.url, error)

    def _pace(self, count: int) -> None:
        """Called before bytes are sent."""
        if self._stopping.wait(self._bucket.delay(count)):
            raise _Stopped

    def _waiting(self) -> list[Generation]:
        """What is to be promoted; of what the archive's rule drops at once it is said."""
        if self.options.archive is None:
            return []
        for one in self._ledger.dropped():
            self._over(one, reason="the archive's rule does not keep it")
        return self._ledger.waiting()

    def _over(self, one: Generation, reason: str | None = None) -> None:
        """A generation is archived as far as this rank can tell, or never will be."""
        with self._lock:
            given_up = self._ledger.over(one, archived=reason is None)
            self._setbacks.over(one.id)
        self._report({"event": "archived", "attempt": one.manifest.attempt, "reason": reason})
        if given_up:
            try:
                delete_unlent(Catalog(self._open_primary()), one)  # else it goes after those
            except (CkptError, OSError) as error:
                logger.warning("%s was given up and stays: %s", one.url, error)

    def _complain(self, error: Exception, pause_s: float) -> None:
        where = self.options.archive or self.options.cache
        self._setbacks.complain(len(self._waiting()), where, error, pause_s)
