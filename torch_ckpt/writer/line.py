"""How far back generations build on one another, and which is whole, as the manifests say it.

Every rank reads the same manifests, so all of them start anew at the same generation, also if one
of them was late or had not seen a commit yet. Knows jobs and manifests. Knows nothing of slabs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_ckpt.errors import CkptError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.manifest.schema import Borrowed, Manifest
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.job import Job

logger = logging.getLogger(__name__)

_REMEMBERED = 4
"""Saves whose commit may not have been seen yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """What this rank has stored of one generation."""

    job: Job
    lenders: tuple[Borrowed, ...]


class Line:
    """The generations since the last one on which all of them may build."""

    def __init__(self) -> None:
        self._unseen: deque[_Share] = deque(maxlen=_REMEMBERED)
        """Saves that nobody has been seen to commit, oldest first."""
        self._passed_over: list[_Share] = []
        """Those of them that came before one that was seen to be committed."""
        self._whole: _Share | None = None
        """The last generation that builds on nothing, on any rank, and has lost nothing."""
        self._newest: Job | None = None
        self._depth: int | None = None
        """Generations since one that builds on nothing; None before the first is seen."""

    def add(self, job: Job, lenders: tuple[Borrowed, ...]) -> None:
        """This rank's share of a generation is durable, in these shards."""
        self._unseen.append(_Share(job=job, lenders=lenders))
        self._newest = job

    def look(
        self, job: Job, store: Store, base: Sequence[tuple[str, str]] = (), *, lossy: bool = False
    ) -> Mapping[str, Generation]:
        """Take in what was committed since; what there is for a save to build on, by folder.

        All manifests are asked for at once: also those of `base`, folders and attempts, and the
        one that a `lossy` save has to name. Empty if storage does not say what is there: then
        nothing is built on.
        """
        wanted = {share.job.folder for share in self._unseen} | {folder for folder, _ in base}
        if lossy and self._whole is not None and follows(job, self._whole.job):
            wanted.add(self._whole.job.folder)
        if not wanted:
            return {}
        try:
            there = Catalog(store).read(wanted)
        except (CkptError, OSError) as error:
            logger.debug("nothing is built on: %s", error)
            self._whole = None  # it may be what cannot be read, and must not be asked for again
            return {}
        self._take_in(there)
        return there

    def goes_on(self, job: Job, full_every: int) -> bool:
        """Whether a generation may build on the ones before it, as far as `look` has seen them."""
        seen = not (self._unseen and self._unseen[-1].job is self._newest)
        if self._newest is None or self._depth is None or not seen:
            return False
        return self._depth < full_every and follows(job, self._newest)

    def will_go_on(self, job: Job, manifest: Manifest | None, full_every: int) -> bool:
        """Whether one may lose something that comes right after a save that was added last.

        Said before it is looked for: no if in doubt. Of a save that others commit there is no
        `manifest` yet; they know whether it builds on anything.
        """
        if self._newest is not job:
            return False
        if manifest is not None and not manifest.bases:
            return True
        if self._whole is None or [share.job for share in self._unseen] != [job]:
            return False
        return (self._depth or 0) + 1 < full_every

    def anchors(self, job: Job, there: Mapping[str, Generation]) -> tuple[Borrowed, ...]:
        """This rank's shards in a generation that is whole; empty if none is known."""
        whole = self._whole
        if whole is None or not follows(job, whole.job):
            return ()
        return whole.lenders if are_sound(needed((), whole.job), there) else ()

    def _take_in(self, there: Mapping[str, Generation]) -> None:
        lacking: list[_Share] = []
        before, self._passed_over = self._passed_over, []
        for share in list(self._unseen):
            found = there.get(share.job.folder)
            if found is not None and found.manifest.attempt == share.job.attempt:
                self._unseen.remove(share)
                self._pass(share, found.manifest)
                self._passed_over += lacking
                lacking = []
            elif any(share is one for one in before):
                # Commits come in order. At the second look, since the first one may have asked
                # for it just before its commit and for the later one just after.
                self._unseen.remove(share)
            else:
                lacking.append(share)

    def _pass(self, share: _Share, manifest: Manifest) -> None:
        if not manifest.bases:
            self._whole, self._depth = share, 0
        elif self._depth is None:
            self._depth = len(manifest.bases)  # others go back further than this rank
        else:
            self._depth += 1


def follows(job: Job, before: Job) -> bool:
    """Whether a save may build on an earlier one of this process."""
    return (job.run, job.root) == (before.run, before.root) and job.step > before.step


def needed(borrowed: Sequence[Borrowed], job: Job) -> list[tuple[str, str]]:
    """Folder and attempt of a generation and of those that its part borrows from."""
    return [(job.folder, job.attempt), *((one.folder, one.attempt) for one in borrowed)]


def are_sound(wanted: Sequence[tuple[str, str]], there: Mapping[str, Generation]) -> bool:
    """Whether generations, by folder and attempt, are committed and not set apart.

    Another rank may have failed, and somebody may have removed or quarantined one.
    """
    return all(
        folder in there
        and there[folder].manifest.attempt == attempt
        and not there[folder].set_apart
        for folder, attempt in wanted
    )
