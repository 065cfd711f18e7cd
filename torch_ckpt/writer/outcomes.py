"""What a writer remembers of its saves: where one failed, and which votes may have been in vain.

Knows attempts and stores. Knows nothing of processes or messages.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from torch_ckpt.errors import CkptError, SaveFailed
from torch_ckpt.manifest.commit import read_manifest
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.leftovers import sweep_lost

logger = logging.getLogger(__name__)

_REMEMBERED = 8
"""More than can be under way between two agreements of the ranks."""


@dataclass(frozen=True, kw_only=True)
class _Vote:
    store: Store
    folder: str
    step: int
    attempt: str


class Outcomes:
    """The saves of one writer, in order. Its methods may be called from two threads."""

    def __init__(self) -> None:
        self._lost: set[tuple[str, str]] = set()
        self._voted: deque[_Vote] = deque(maxlen=_REMEMBERED)
        self._doubted: deque[str] = deque(maxlen=_REMEMBERED)

    def failed(self, store: Store, folder: str) -> None:
        """A save into this folder failed: other ranks may still write files of it."""
        self._lost.add((store.url, folder))

    def begin(self, job: Job, store: Store) -> None:
        """A save begins: it may need the room that failed ones still take."""
        if job.rank == 0:
            self._clear_up(job, store)

    def done(self, job: Job, store: Store) -> None:
        """A save is committed, as far as this rank can tell."""
        if job.rank != 0:
            vote = _Vote(store=store, folder=job.folder, step=job.step, attempt=job.attempt)
            self._voted.append(vote)
        elif self._clear_up(job, store):
            # Every rank has voted since, so none writes for an earlier save any more.
            self._lost = {(url, folder) for url, folder in self._lost if url != store.url}

    def _clear_up(self, job: Job, store: Store) -> bool:
        folders = {folder for url, folder in self._lost if url == store.url} - {job.folder}
        try:
            sweep_lost(store, sorted(folders), job.attempt)
        except (CkptError, OSError) as error:
            logger.warning("what failed saves left is not removed yet: %s", error)
            return False
        return True

    def doubt(self, attempt: str) -> None:
        """Another rank says that this attempt failed there."""
        if any(vote.attempt == attempt for vote in list(self._voted)):
            self._doubted.append(attempt)

    def in_vain(self) -> list[SaveFailed]:
        """The saves for which this rank voted and another one did not; each is told once.

        Ask after the next save: the coordinator, which heard of it at the same time, has decided
        by then.
        """
        told = []
        while self._doubted:
            attempt = self._doubted.popleft()
            for vote in [one for one in self._voted if one.attempt == attempt]:
                self._voted.remove(vote)
                if not _committed(vote):
                    reason = (
                        "this rank's share was written, but another rank's failed; that rank's "
                        "log says why"
                    )
                    told.append(SaveFailed(step=vote.step, reason=reason))
        return told


def _committed(vote: _Vote) -> bool:
    """Whether the generation is there; storage that does not answer is no proof that it is not."""
    try:
        return read_manifest(vote.store, vote.folder).attempt == vote.attempt
    except FileNotFoundError:
        return False
    except (CkptError, OSError):
        return True
