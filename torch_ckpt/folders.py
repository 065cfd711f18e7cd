"""Where saves go: beside a generation that was set aside or may be a base, never over it.

Knows names and generations. Knows nothing of states or writers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from threading import Thread

from torch_ckpt.errors import CkptError
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.prune import lending
from torch_ckpt.generations.tiers import PATIENCE_S
from torch_ckpt.manifest.layout import step_of_folder
from torch_ckpt.storage.store import Store

logger = logging.getLogger(__name__)


class Folders:
    """The folders of one run's root, as far as saves must keep clear of them."""

    def __init__(self, store: Store, *, builds: bool) -> None:
        """`builds` says that saves of this process may be bases of later ones."""
        self._store, self._builds = store, builds
        self._known = False
        """Whether `apart` tells of all that was there before."""
        self._newest = -1
        """The highest step that was saved here."""
        self.apart: frozenset[str] = frozenset()
        """Those of generations that stay as they are: set aside, quarantined, or a base."""

    def leave(self, apart: Iterable[str]) -> None:
        """A resume has looked at the root: these stay as they are."""
        self.apart, self._known = frozenset(apart), True

    def look(self, folder: str, from_rank_0: Callable[[object], object], *, leads: bool) -> None:
        """Find out what must stay, on all ranks, before the first save into a step's folder.

        A resume has done so before. Training waits for it, a few seconds at most: if storage says
        nothing, saves go beside whatever may be there until it does.
        """
        if self._known or step_of_folder(folder) is None:
            return
        found = from_rank_0(self._there() if leads else None)
        if isinstance(found, frozenset):
            self.leave(self.apart | found)

    def clear(self, folder: str, step: int, attempt: str) -> str:
        """The folder for a save that wants `folder`."""
        again = not self._known or (self._builds and step < self._newest)
        self._newest = max(self._newest, step)
        lends = again and step_of_folder(folder) is not None
        return f"{folder}-{attempt}" if folder in self.apart or lends else folder

    def _there(self) -> frozenset[str] | None:
        """What must stay of what others have saved; None if storage does not say in time."""
        answers: list[frozenset[str]] = []
        # Not in this thread, nor by a pool of it: a signal handler that saves may interrupt it
        # anywhere, and would wait for ever for what it holds.
        asking = Thread(target=self._ask, args=(answers,), name="ckpt-ask", daemon=True)
        asking.start()
        asking.join(PATIENCE_S)
        if answers:
            return answers[0]
        url = self._store.url
        logger.warning("saves go beside what may be in %s, which cannot be listed", url)
        return None

    def _ask(self, answers: list[frozenset[str]]) -> None:
        try:
            there = Catalog(self._store).committed()
        except (CkptError, OSError) as error:
            logger.warning("%s", error)
            return
        apart = {one.folder for one in there if one.set_apart}
        answers.append(frozenset(lending(there) | apart))
