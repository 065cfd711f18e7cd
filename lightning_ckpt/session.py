"""One `fit`, `validate` or `test` of one trainer, between the callback's setup and teardown.

The live state is the dictionary that `trainer.save_checkpoint` makes: it goes to the engine
where the strategy would have written it, and comes from the engine where the strategy would have
read it. Knows a trainer's public methods and the engine. Knows nothing of schedules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_ckpt.paths import as_text, as_url, resolved
from lightning_ckpt.private import Trainer
from lightning_ckpt.reading import (
    KEY,
    allow_pickle_for,
    is_generation,
    read_checkpoint,
    read_into,
)
from lightning_ckpt.resume import Resume
from lightning_ckpt.strategy import is_sharded, own_states, received
from torch_ckpt import Checkpointer, CkptError, Generation, PendingSave, Retention, SnapshotTorn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user chose, checked."""

    root: str
    keep: Retention | None
    overlap: bool
    allow_pickle: bool
    storage_options: Mapping[str, Any] | None
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Passed on to the engine as it is."""

    def open_engine(self, **changed: Any) -> Checkpointer:
        """The engine for this run; with `distributed=None` all ranks must open it together."""
        given = {
            "keep": self.keep,
            "fence": "manual",
            "allow_pickle": self.allow_pickle,
            "storage_options": dict(self.storage_options) if self.storage_options else None,
            **self.engine,
        }
        for tier in ("archive", "cache"):
            if given.get(tier) is not None:
                given[tier] = as_url(given[tier])
        return Checkpointer(self.root, **{**given, **changed})

    def committed(self) -> list[Generation]:
        """The generations that may be used, newest first."""
        with self.open_engine(distributed=False) as alone:
            found = alone.generations()
        return [one for one in found if not one.tags.keys() & {"damaged", "aside"}]


class Session:
    """Holds the engine and stands in for the strategy's way of saving and loading."""

    def __init__(self, trainer: Trainer, options: Options, resume: Resume) -> None:
        self.trainer = self._trainer = trainer
        self._options, self._resume = options, resume
        self._engine: Checkpointer | None = None
        self._handling: Callable[[dict[str, Any]], PendingSave | None] | None = None
        self._saves: list[PendingSave] = []
        self._eager = not options.overlap
        self.on_loaded: Callable[[dict[str, Any]], None] = lambda extra: None
        """Gets what this adapter had added to a checkpoint that `fit` starts from."""
        self.latest: PendingSave | None = None
        self.committed: PendingSave | None = None
        strategy = trainer.strategy
        self._save_file, self._load_file = strategy.save_checkpoint, strategy.load_checkpoint
        strategy.save_checkpoint, strategy.load_checkpoint = self._save, self._load

    @property
    def engine(self) -> Checkpointer:
        """The engine; on all ranks, first used at the same place."""
        if self._engine is None:
            self._engine = self._options.open_engine()
        return self._engine

    @property
    def archive_lag(self) -> int:
        """Saves that are committed and not in the archive yet."""
        return self._engine.archive_lag if self._engine is not None else 0

    def save(
        self,
        *,
        block: Literal["copied", "staged"],
        metrics: Mapping[str, float],
        extra: Mapping[str, Any],
    ) -> PendingSave:
        """Hand this step to the engine; collective."""
        trainer = self._trainer
        step = trainer.global_step

        def hand_over(checkpoint: dict[str, Any]) -> PendingSave:
            checkpoint[KEY] = dict(extra)
            return self.engine.save(
                checkpoint,
                step,
                block="staged" if self._eager else block,
                metrics=metrics,
                optimizers=trainer.optimizers,
            )

        pending = self._with_state(hand_over)
        if pending is None:
            raise RuntimeError("Lightning did not come to the strategy's save_checkpoint")
        self.latest = pending
        self._saves.append(pending)
        return pending

    def prepare(self) -> None:
        """Size the slabs for the state as it is now, and start the writer, behind training."""
        self._with_state(
            lambda checkpoint: self.engine.prepare(checkpoint, optimizers=self._trainer.optimizers)
        )

    def fence(self) -> None:
        """Complete a copy that goes on: something is about to change the state."""
        if self._engine is not None:
            self._engine.fence()

    def settle(self) -> bool:
        """Look what became of the saves; True if there is news."""
        done = [save for save in self._saves if save.done]
        self._saves = [save for save in self._saves if not save.done]
        for save in done:
            if save.state == "committed":
                self.committed = save
            elif isinstance(save.error, SnapshotTorn) and not self._eager:
                self._eager = True
                logger.warning(
                    "something other than the optimizers changes the state between steps, so "
                    "from now on a save copies everything before training goes on"
                )
        return bool(done)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every save is committed; one that failed is logged, or raised if asked."""
        if self._engine is None:
            return
        try:
            self._engine.wait(timeout_s)
        except CkptError as error:
            if self._options.engine["on_error"] == "raise":
                raise
            logger.error("%s", error)
        self.settle()

    def close(self) -> None:
        """Give the strategy its methods back and end the engine, which finishes what it holds."""
        for name in ("save_checkpoint", "load_checkpoint"):
            vars(self._trainer.strategy).pop(name, None)
        engine, self._engine = self._engine, None
        if engine is not None:
            try:
                engine.close()
            except CkptError as error:
                if self._options.engine["on_error"] == "raise":
                    raise
                logger.error("%s", error)

    def _with_state(
        self, handling: Callable[[dict[str, Any]], PendingSave | None]
    ) -> PendingSave | None:
        """Do something with the live state, on every rank."""
        self._handling, self._result = handling, None
        try:
            with own_states(self._trainer.strategy):
                self._trainer.save_checkpoint(self._options.root, weights_only=False)
        finally:
            self._handling = None
        return self._result

    def _save(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """In place of `Strategy.save_checkpoint`."""
        handling, self._handling = self._handling, None
        if handling is None:
            self._save_file(checkpoint, filepath, storage_options=storage_options)
        else:
            self._result = handling(checkpoint)

    def _load(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """In place of `Strategy.load_checkpoint`."""
        if args:
            kwargs["weights_only"] = args[0]
        weights_only = kwargs.get("weights_only")
        if self._trainer.state.fn.value == "fit":
            allow = allow_pickle_for(weights_only, self._options.allow_pickle)
            if self._engine is None and allow != self._options.allow_pickle:
                self._engine = self._options.open_engine(allow_pickle=allow)
            checkpoint = self._resume.load(
                self._trainer, self.engine, as_text(path), lambda other: self._read(other, kwargs)
            )
            if (extra := checkpoint.pop(KEY, None)) is not None:
                self.on_loaded(extra)
            return checkpoint
        return self._read(path, kwargs)

    def _read(self, path: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        url = resolved(as_url(path))
        if not is_generation(url):
            return self._load_file(path, **options)
        given = {
            "weights_only": options.get("weights_only"),
            "allow_pickle": self._options.allow_pickle,
            "storage_options": self._options.storage_options,
        }
        if not is_sharded(self._trainer.strategy):
            return read_checkpoint(path, **given)
        into = received(self._trainer, unread=[KEY])
        read_into(url, into, **given)
        return into.state
