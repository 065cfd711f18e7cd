"""Removals wait for the saves that were submitted before them.

A checkpoint that a user gave up for a newer one is deleted once the newer one is committed, and
kept if that save failed. Knows generations. Knows nothing of processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch_ckpt.errors import CkptError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.prune import delete_unlent
from torch_ckpt.storage.store import Store

logger = logging.getLogger(__name__)

LetGo = Callable[[Store, Generation], bool]


class Removals:
    """Holds removals back while the last save before them is not committed."""

    def __init__(self, let_go: LetGo | None = None) -> None:
        """`let_go` says whether another tier can do without a generation yet."""
        self._let_go = let_go
        self._safe = True
        self._held: list[tuple[Store, str]] = []

    def committed(self) -> None:
        """A save committed: what was held back may go."""
        self._safe = True
        held, self._held = self._held, []
        for store, folder in held:
            self._carry_out(store, folder)

    def failed(self) -> None:
        """A save failed: later removals wait for one that commits."""
        self._safe = False

    def submit(self, store: Store, folder: str) -> None:
        """Remove a generation now, or after the next commit."""
        if self._safe:
            self._carry_out(store, folder)
        else:
            logger.warning("%s is kept until a newer save commits", folder)
            self._held.append((store, folder))

    def end(self) -> None:
        """Say what stays, and why."""
        for _, folder in self._held:
            reason = "other generations build on it" if self._safe else "no newer save committed"
            logger.warning("%s was to be removed and is kept: %s", folder, reason)

    def _carry_out(self, store: Store, folder: str) -> None:
        catalog = Catalog(store)
        try:
            generation = catalog.find(folder=folder)
            if self._let_go is not None and not self._let_go(store, generation):
                logger.info("%s is removed once the archive has it", folder)
                return
            if not delete_unlent(catalog, generation):
                logger.info("%s is removed once no other generation builds on it", folder)
                self._held.append((store, folder))
        except FileNotFoundError:
            logger.debug("%s is not there any more", folder)
        except (CkptError, OSError) as error:
            logger.warning("could not remove %s: %s", folder, error)
