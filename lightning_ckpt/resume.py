"""Where `fit()` starts: the newest good generation, unless the user named another checkpoint.

Lightning asks a callback for a path before the ranks know each other, and loads it later on all
of them. So every rank offers what it sees, the ranks compare, and the load itself goes through
the engine, where rank 0 chooses and all ranks step back together if a generation is damaged.
Knows paths, steps and the engine. Knows nothing of how checkpoints are written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_ckpt.paths import as_url, resolved, split
from lightning_ckpt.private import Trainer, slurm_checkpoint
from lightning_ckpt.reading import MANIFEST, explained
from lightning_ckpt.strategy import received
from torch_ckpt import Checkpointer, DisagreementError, Generation, GenerationNotFound

logger = logging.getLogger(__name__)


class Resume:
    """One run's way back: offers a path to Lightning, and loads what Lightning then asks for."""

    def __init__(self, root: str, open_engine: Callable[..., Checkpointer]) -> None:
        self._root, self._open_engine = root, open_engine
        self._offered = ""
        self._asked = False

    def offer(self) -> str:
        """The file that stands for the newest good generation; empty if there is none yet.

        Raises:
            NothingUsable: there are generations, and all of them are damaged.
        """
        with self._open_engine(distributed=False) as alone:
            found = _newest(alone)
        self._asked = True
        self._offered = f"{found.url}/{MANIFEST}" if found is not None else ""
        _announce(found, self._root)
        return self._offered

    def compare(self, trainer: Trainer) -> None:
        """Make sure that all ranks resume, or none does.

        Raises:
            DisagreementError: the run's folder is not the same one for all ranks.
        """
        if trainer.world_size == 1 or not self._asked:
            return
        resuming = bool(self._offered)
        of_rank_zero = trainer.strategy.broadcast(resuming)
        if not trainer.strategy.reduce_boolean_decision(of_rank_zero == resuming, all=True):
            raise DisagreementError(
                f"rank 0 {'finds a' if of_rank_zero else 'finds no'} generation in {self._root}, "
                f"and another rank does not agree; use storage that all nodes share"
            )

    def load(
        self,
        trainer: Trainer,
        engine: Checkpointer,
        path: str,
        read: Callable[[str], dict[str, Any]],
    ) -> dict[str, Any]:
        """What `fit()` starts from; `path` is what Lightning decided on.

        Where that was not the user's decision, a generation of this run that is at least as new
        takes its place.
        """
        mine = self._asked and path == self._offered
        theirs = self._asked or path == slurm_checkpoint(trainer)
        self.forget()
        if mine:
            return self._newest(trainer, engine)
        if not theirs:
            return self._named(trainer, engine, path, read)
        checkpoint = read(path)
        step = int(checkpoint.get("global_step", 0))
        newest = engine.latest()
        if newest is None or newest.step < step:
            logger.info("starting from %s (step %d), the newest there is", path, step)
            return checkpoint
        logger.info("not starting from %s (step %d): step %d is saved", path, step, newest.step)
        return self._newest(trainer, engine)

    def forget(self) -> None:
        """Lightning has decided, or will ask again."""
        self._offered, self._asked = "", False

    def _newest(self, trainer: Trainer, engine: Checkpointer) -> dict[str, Any]:
        into = received(trainer)
        with explained():
            generation = engine.resume(into)
        if generation is None:
            raise GenerationNotFound(f"the generations in {self._root} are gone again")
        return into.state

    def _named(
        self,
        trainer: Trainer,
        engine: Checkpointer,
        path: str,
        read: Callable[[str], dict[str, Any]],
    ) -> dict[str, Any]:
        """What the user named: of this run, it begins a new line; anything else is just read."""
        url = resolved(as_url(path))
        if split(url)[1] == MANIFEST:
            url = split(url)[0]
        root, folder = split(url)
        known = {one.folder: one for one in engine.generations()} if root == self._root else {}
        if folder not in known:
            return read(path)
        into = received(trainer)
        with explained():
            engine.resume(into, step=known[folder].step)
        return into.state


def _newest(alone: Checkpointer) -> Generation | None:
    """What this rank sees, without asking the others."""
    if not dist.is_available() or not dist.is_initialized():
        return alone.latest()  # after the writer of a trainer that died has finished
    # A second `fit` of these processes: rank 0's writer may be at work, and is no orphan.
    usable = (one for one in alone.generations() if not one.tags.keys() & {"damaged", "aside"})
    return next(usable, None)


@rank_zero_only
def _announce(found: Generation | None, root: str) -> None:
    if found is None:
        logger.info("there is no generation in %s yet: this run starts afresh", root)
    else:
        logger.info("the newest generation is step %d (%s)", found.step, found.url)
