"""Parts are votes: wait until every rank's part of one attempt is there, whole, and its own.

One listing a poll, with back-off; every part is read once, as it arrives. Knows names in a folder
and the first fields of parts. Knows nothing of processes or tensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

from torch_ckpt.errors import SaveFailed
from torch_ckpt.manifest.commit import collect_vote, read_manifest
from torch_ckpt.manifest.layout import attempt_of, part_name, refusal_name, shard_name
from torch_ckpt.manifest.schema import Borrowed, StoredFile, Vote
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.leftovers import refusal
from torch_ckpt.writer.shard import Written

logger = logging.getLogger(__name__)

_FIRST_POLL_S = 0.005
_SLOWEST_POLL_S = 2.0
_SAY_AFTER_S = 10.0
_PATIENCE = 1 / 30
"""Of the commit's time-out: how long a coordinator whose trainer is gone waits for news."""
_GONE_S = 5.0
"""A writer that is killed is replaced much sooner, as long as its trainer lives."""
_OWN_SHARES = 4
"""Shares are of about one size, so the others' take no more than so many times one's own."""


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What may end the wait before its time."""

    abandoned: Callable[[], str | None]
    """A reason if this save will never be complete."""
    alone: Callable[[], bool]
    """Whether the trainer is gone: then nobody will ever tell of a failure."""
    own_s: float
    """Seconds that this rank's own share took."""
    gone: Callable[[Iterable[int]], frozenset[int]] = lambda ranks: frozenset()
    """Those of some ranks whose writers were on this node and have ended."""


@dataclass(frozen=True, kw_only=True)
class Votes:
    """All parts in rank order, and how many bytes their shards have."""

    parts: tuple[StoredFile, ...]
    shard_bytes: int
    bases: tuple[int, ...] = ()
    """The steps that they build on."""
    lossy: tuple[str, ...] = ()
    """By which rules something is lost in them."""


def await_votes(
    store: Store, job: Job, own: tuple[StoredFile, Written], pool: Executor, outside: Outside
) -> Votes:
    """Return once the parts of all ranks are there.

    What a reader checks over all tensors, that each is stored whole and once, is not checked
    again here: it would take minutes for a thousand ranks. It cannot fail for parts of one
    attempt. Only a save that all ranks agreed on has an attempt, and they agree only if the
    fingerprint of what they share (names, dtypes, shapes, in order) is the same everywhere, and
    its owners are a pure function of what all of them know. So the shares are those of one plan,
    in which every shared element has one owner; what is one rank's own carries that rank in its
    name, and is whole in its part. Aliases come from the same walk as the names. Each rank has
    checked its own part as a reader would, before it voted.

    Raises:
        SaveFailed: a rank refused or did not vote in time, the save was abandoned, or a part
            builds on what is not committed.
        FormatError: a part is not what the writer of its rank makes.
    """
    wait = _Wait(job=job, outside=outside)
    parts, shard_bytes = {0: own[0]}, own[1].bytes
    borrowed, lossy = set(own[1].borrowed), set(own[1].lossy)
    missing = {part_name(rank, job.attempt): rank for rank in range(1, job.world_size)}
    while True:
        there = {entry.name: entry.bytes for entry in store.entries(job.folder)}
        arrived = [name for name in missing if name in there]
        # A few at once, for storage that answers slowly; each part is dropped when it was read.
        found = pool.map(lambda name: collect_vote(store, job.folder, name), arrived)
        for name, collected in zip(arrived, found, strict=True):
            if collected is None:
                continue  # its end has not arrived
            rank = missing.pop(name)
            parts[rank], vote = collected
            _check(vote, job, rank, f"{store.url}/{job.folder}/{name}")
            shard_bytes += sum(shard.bytes for shard in vote.files)
            borrowed.update(vote.borrowed)
            lossy.update(vote.lossy)
        if not missing:
            break
        _check_refusals(store, job, missing.values(), there)
        wait.go_on(there, sorted(missing.values()))
    ordered = tuple(parts[rank] for rank in range(job.world_size))
    return Votes(
        parts=ordered,
        shard_bytes=shard_bytes,
        bases=_bases(store, job, borrowed),
        lossy=tuple(sorted(lossy)),
    )


def _bases(store: Store, job: Job, borrowed: Iterable[Borrowed]) -> tuple[int, ...]:
    """The steps of the generations in which shards lie that parts borrow."""
    needed = {(one.step, one.folder, one.attempt) for one in borrowed}
    for step, folder, attempt in sorted(needed):
        try:
            found = read_manifest(store, folder).attempt
        except FileNotFoundError:
            found = None
        if found != attempt:
            reason = f"a rank built on step {step} in {folder}, which is not committed"
            raise SaveFailed(step=job.step, reason=reason)
    return tuple(sorted({step for step, _, _ in needed}))


def _check(vote: Vote, job: Job, rank: int, file: str) -> None:
    wanted = (job.step, job.attempt, job.run, job.world_size, rank)
    found = (vote.step, vote.attempt, vote.run, vote.world_size, vote.rank)
    if found != wanted:
        raise SaveFailed(
            step=job.step,
            reason=f"{file} is of step, attempt, run, world size and rank {found}, not {wanted}",
        )
    own_names = {shard_name(rank, job.attempt, encoded=encoded) for encoded in (False, True)}
    if not own_names.issuperset(shard.name for shard in vote.files):
        raise SaveFailed(step=job.step, reason=f"{file} names shards that rank {rank} has not")


def _check_refusals(
    store: Store, job: Job, missing: Iterable[int], there: Mapping[str, int]
) -> None:
    for rank in missing:
        if refusal_name(rank, job.attempt) in there:
            reason = f"rank {rank} gave up: {refusal(store, job.folder, rank, job.attempt)}"
            raise SaveFailed(step=job.step, reason=reason)


@dataclass(kw_only=True)
class _Wait:
    """How long to wait, and what to say meanwhile."""

    job: Job
    outside: Outside
    began: float = field(default_factory=time.monotonic)
    pause: float = _FIRST_POLL_S
    news: frozenset[tuple[str, int]] = frozenset()
    heard: float = field(default_factory=time.monotonic)
    """When something new was listed, or the trainer was last known to live."""
    said: bool = False
    gone: dict[int, float] = field(default_factory=dict)
    """Ranks whose writers have ended, and since when."""

    def go_on(self, there: Mapping[str, int], missing: list[int]) -> None:
        """Sleep until the next poll.

        Raises:
            SaveFailed: there is no point in another one.
        """
        reason = self.outside.abandoned() or self._over(there, missing)
        if reason is not None:
            raise SaveFailed(step=self.job.step, reason=reason)
        if not self.said and time.monotonic() - self.began > _SAY_AFTER_S:
            self.said = True
            logger.warning(
                "step %d waits for the part of rank %s, for up to %g s in all",
                self.job.step,
                _listed(missing),
                self.job.commit_timeout_s,
            )
        time.sleep(self.pause)
        self.pause = min(self.pause * 1.5, _SLOWEST_POLL_S)

    def _over(self, there: Mapping[str, int], missing: list[int]) -> str | None:
        now, limit = time.monotonic(), self.job.commit_timeout_s
        if now - self.began > limit:
            return (
                f"rank {_listed(missing)} did not finish its part within {limit:g} s; if it was "
                f"alive, does its root lead to {self.job.root} too?"
            )
        gone = self.outside.gone(missing)
        self.gone = {rank: self.gone.get(rank, now) for rank in gone}
        # Whoever ended before the listing of this poll and is missing in it will never vote.
        late = sorted(rank for rank, since in self.gone.items() if now - since > _GONE_S)
        if late:
            return f"rank {_listed(late)} was killed before its part was finished"
        news = frozenset(one for one in there.items() if attempt_of(one[0]) == self.job.attempt)
        if news != self.news or not self.outside.alone():
            self.news, self.heard = news, now
        patience = max(limit * _PATIENCE, _OWN_SHARES * self.outside.own_s)
        if now - self.heard > patience:
            return (
                f"rank {_listed(missing)} did not finish its part, and wrote nothing for "
                f"{patience:.0f} s after the trainer had ended"
            )
        return None


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
