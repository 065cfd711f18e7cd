"""Which saves of this rank are committed by now: on ranks other than 0 only storage tells.

A thread of its own, so that neither a slow archive nor a slow disk holds up who waits for commits.
Knows stores and manifests. Knows nothing of what is done with a committed generation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch_ckpt.errors import FormatError, IntegrityError
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.manifest.commit import read_manifest
from torch_ckpt.manifest.schema import Manifest
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.job import Job

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_STOP_S = 1.0


@dataclass(kw_only=True)
class _Voted:
    """A save of which this rank has done its share, and that rank 0 may commit."""

    folder: str
    attempt: str
    until: float


class Follower:
    """Follows each save from this rank's vote to the commit, and calls `committed` with it."""

    def __init__(
        self,
        *,
        rank: int,
        primary: Callable[[], Store],
        committed: Callable[[Store, Generation], None],
        gone: Callable[[str], None],
        over: Callable[[], None],
    ) -> None:
        """All are called on a thread of this class: `committed` in the order of the saves, `gone`
        with the attempt of one that is not there and will not come, `over` after these."""
        self._rank, self._primary = rank, primary
        self._committed, self._gone, self._over = committed, gone, over
        self._voted: list[_Voted] = []
        self._lock = threading.Lock()
        self._news, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-follow", daemon=True)
        self._thread.start()

    @property
    def follows(self) -> bool:
        """Whether it is open what becomes of some save."""
        return bool(self._voted)

    def voted(self, job: Job) -> None:
        """This rank's share of a save is durable."""
        until = time.monotonic() + job.commit_timeout_s
        with self._lock:
            self._voted.append(_Voted(folder=job.folder, attempt=job.attempt, until=until))
        self._news.set()

    def stop(self) -> None:
        """Follow no more."""
        self._stopping.set()
        self._news.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            try:
                self._look(self._primary())
            except Exception as error:  # whatever a backend raises: saves tell of it themselves
                logger.debug("cannot see what is committed: %s", error)
            pause = min(pause * 2, _LONGEST_PAUSE_S)
            if self._news.wait(pause if self._voted else None):
                pause = _FIRST_PAUSE_S
            self._news.clear()

    def _look(self, primary: Store) -> None:
        found: list[Generation] = []
        over: list[_Voted] = []
        for one in reversed(list(self._voted)):
            generation = self._generation(primary, one)
            # Rank 0 votes when it has committed, and saves are committed in their order: what is
            # not there then was lost, or pruned.
            if generation is not None:
                found.append(generation)
            if found or self._rank == 0 or time.monotonic() >= one.until:
                over.append(one)
                if generation is None:
                    self._gone(one.attempt)
        try:
            for generation in reversed(found):
                self._committed(primary, generation)
        finally:
            with self._lock:
                self._voted = [one for one in self._voted if one not in over]
            if over:
                self._over()

    def _generation(self, store: Store, one: _Voted) -> Generation | None:
        try:
            manifest = read_manifest(store, one.folder)
        except (FileNotFoundError, FormatError, IntegrityError):
            return None
        if manifest.attempt != one.attempt:
            return None
        return generation_of(store, one.folder, manifest)


def generation_of(store: Store, folder: str, manifest: Manifest) -> Generation:
    """The description of a generation whose manifest is known."""
    url = f"{store.url}/{folder}"
    return Generation(folder=folder, url=url, step=manifest.step, manifest=manifest)
