"""The callback: saves on its own schedule behind training, and resumes the run by itself.

The copy of what the optimizers own goes on while the next forward and backward run, and is
complete before the optimizer step changes anything. Knows Lightning's hooks. Knows nothing of how
a save is done or which generation is good: the engine does.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Unpack, override

from lightning_ckpt import twins
from lightning_ckpt.exact import ExactResume
from lightning_ckpt.metrics import Metrics
from lightning_ckpt.numbers import report, report_last
from lightning_ckpt.paths import TIER_OPTIONS, as_url
from lightning_ckpt.private import Trainer
from lightning_ckpt.resume import Resume
from lightning_ckpt.schedule import Schedule
from lightning_ckpt.session import Options, Session
from lightning_ckpt.sigterm import Sigterm
from lightning_ckpt.situation import (
    is_last_epoch,
    is_sigterm,
    is_stopping,
    silence_untrue_warnings,
    validation_follows,
)
from lightning_ckpt.strategy import refuse_averages, refuse_strategy
from torch_ckpt import (
    CkptError,
    ConfigError,
    EncodingOptions,
    Generation,
    KeepLast,
    PendingSave,
    PerRank,
    Retention,
)

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import OnExceptionCheckpoint as _Base
else:
    _Base = object

logger = logging.getLogger(__name__)

_KEEP = KeepLast(3)
_SIGTERM_CODE = 128 + 15
_NOT_OPTIONS = ("self", "__class__", "encoding")
_ENGINE_OPTIONS = (
    "mode",
    "slabs",
    "on_busy",
    "on_error",
    "writer_timeout_s",
    "commit_timeout_s",
    *TIER_OPTIONS,
)


class CheckpointCallback(_Base):
    """Saves the whole run every so often, and starts from the newest good generation.

    The same script goes on where the run was after any crash. A `ckpt_path` given to `fit` wins.
    One root belongs to one run.

    Args:
        root: folder or fsspec URL for the generations of this run, the same for all ranks.
        archive, cache: folder or URL to which generations go on, and a folder on each node's disk.
        every_n_steps: save after so many optimizer steps; with no interval, after every epoch.
        every_minutes: save after so many minutes, at the next optimizer step.
        keep: which generations stay. With `KeepBest`, every validation is saved too.
        resume: "never" starts afresh, or where `fit(ckpt_path=...)` says.
        overlap: copy behind forward and backward; off, a save copies everything at once.
        exact: restore data position and random state too, so that the run is bitwise the same.
        skip: "fast" leaves batches already seen unread where that need not be exact.
        strict: whether other data than the run was saved with is an error where `exact` is on.
        mode: "sync" makes every save durable before training goes on.
        slabs: snapshots in host memory at once.
        on_busy: what a save does while all slabs are being written: wait, or be left out.
        on_error: "raise" lets a failed save stop training at the next one.
        writer_timeout_s: how long a silent writer is believed to be alive.
        commit_timeout_s: how long a save may take to become durable.
        allow_pickle: whether resuming may unpickle custom objects (`weights_only=False` does too).
        storage_options: for fsspec, where `root` is a URL.
        keep_archive, permanent_every, archive_options, archive_timeout_s, bandwidth_limit: of the
            archive; `encoding`: of what is stored. Both are as in `torch_ckpt.Checkpointer`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> CheckpointCallback:
        # Lightning resumes by itself from the path that an OnExceptionCheckpoint offers, and each
        # twin package asks for its own class; so the bases are chosen when the options are known.
        never = kwargs.get("resume", "auto") == "never"
        bases = twins.callback_bases("Checkpoint" if never else "OnExceptionCheckpoint")
        return object.__new__(twins.with_bases(cls, bases))

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        archive: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        every_n_steps: int | None = None,
        every_minutes: float | None = None,
        keep: Retention | None = _KEEP,
        resume: Literal["auto", "never"] = "auto",
        overlap: bool = True,
        exact: bool = True,
        skip: Literal["exact", "fast"] = "exact",
        strict: bool = True,
        mode: Literal["async", "sync"] = "async",
        slabs: Literal[1, 2] = 2,
        on_busy: Literal["wait", "skip"] = "wait",
        on_error: Literal["log", "raise"] = "log",
        writer_timeout_s: float = 60.0,
        commit_timeout_s: float = 1800.0,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        keep_archive: Retention | Literal["default"] | None = "default",
        permanent_every: int | None = None,
        archive_options: Mapping[str, Any] | None = None,
        archive_timeout_s: float = 300.0,
        bandwidth_limit: float | None = None,
        **encoding: Unpack[EncodingOptions],
    ) -> None:
        given: dict[str, Any] = {k: v for k, v in locals().items() if k not in _NOT_OPTIONS}
        if resume not in ("auto", "never"):
            raise ConfigError(f"resume must be 'auto' or 'never', got {resume!r}")
        self._given = {**given, **encoding}
        self._schedule = Schedule(every_n_steps=every_n_steps, every_minutes=every_minutes)
        self._options = Options(
            root=as_url(root),
            keep=keep,
            overlap=overlap,
            allow_pickle=allow_pickle,
            storage_options=storage_options,
            engine={**{name: given[name] for name in _ENGINE_OPTIONS}, **encoding},
        )
        self._options.open_engine(distributed=False).close()  # refuses bad options now
        self._metrics = Metrics(keep)
        self._new_exact = functools.partial(ExactResume, skip=skip, strict=strict)
        self._wants_exact = exact
        self._exact = self._new_exact() if exact else None  # refuses bad options now
        self._resume = Resume(self._options.root, self._options.open_engine)
        self._sigterm = Sigterm()
        self._session: Session | None = None
        self._saved_at: tuple[int, int] | None = None
        self._seen_step = 0
        self._resumed_step: int | None = None
        self._best = ""
        if resume == "auto":
            silence_untrue_warnings()

    # ── what Lightning asks a checkpoint callback for ─────────────────────────────────────────

    @property
    def ckpt_path(self) -> str:
        """The newest good generation, for `fit` to start from; empty if there is none yet."""
        return self._resume.offer()

    @property
    def best_model_path(self) -> str:
        """What `KeepBest` puts first, or else the newest; empty if there is none."""
        return self._best or self._best_of(self._options.committed())

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:  # ddp_spawn brings it back from its process
        self._best = path

    @property
    def last_model_path(self) -> str:
        """The newest good generation; empty if there is none."""
        found = self._options.committed()
        return found[0].url if found else ""

    # ── hooks ─────────────────────────────────────────────────────────────────────────────────

    @override
    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        refuse_strategy(trainer.strategy, who="CheckpointCallback")
        refuse_averages(trainer)
        if self._session is not None:  # an earlier stage ended before its teardown
            self._end()
        self._best, self._resumed_step = "", None
        self._session = Session(trainer, self._options, self._resume)
        if stage == "fit":
            self._resume.compare(trainer)
            self._exact = self._new_exact() if self._wants_exact else None
            self._session.on_loaded = self._loaded

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        # Not earlier: tuners run the loops in this hook, before it is the turn of this callback.
        if self._exact is not None:
            self._exact.setup(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._resume.forget()
        if self._resumed_step not in (None, trainer.global_step):
            raise ConfigError(
                f"step {self._resumed_step} was loaded, and Lightning dropped it again: "
                "LearningRateFinder and BatchSizeFinder among the callbacks do that. Take them "
                "out of a run that resumes, and tune with Tuner(trainer) before its first fit"
            )
        if self._exact is not None:
            self._exact.restore(trainer)
        self._sigterm.watch(trainer)
        self._schedule.start(trainer.global_step)
        self._seen_step, self._saved_at = trainer.global_step, _place(trainer)
        if not trainer.fast_dev_run:
            # Where the user chose another start, what is newer belongs to a line that was left.
            self._running.engine.set_aside(newer_than=trainer.global_step)
            self._running.prepare()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._exact is not None:
            self._exact.on_train_batch_start(trainer)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self._running.fence()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._exact is not None:
            self._exact.on_train_batch_end(trainer)
        step = trainer.global_step
        if step != self._seen_step and not trainer.fast_dev_run:
            self._seen_step = step
            due = self._due(trainer, step) or is_stopping(trainer)
            if due and not (self._metrics.wanted and validation_follows(trainer)):
                self._save(trainer, block="copied")
        report(self._running, trainer, pl_module)
        self._sigterm.raise_if_any(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._running.fence()  # averaged weights are swapped in for a validation
        if trainer.state.fn.value == "fit":
            self._metrics.before_validation(trainer)
            if self._exact is not None:
                self._exact.on_validation_start(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.state.fn.value != "fit" or trainer.sanity_checking:
            return
        self._metrics.after_validation(trainer)
        if self._exact is not None:
            self._exact.on_validation_end(trainer)
        if (self._metrics.wanted or is_stopping(trainer)) and not trainer.fast_dev_run:
            self._save(trainer, block="copied")
        self._sigterm.raise_if_any(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._running.fence()  # averaged weights may be swapped in at the end of training
        # An epoch cut short by max_steps is saved as one that can go on: at its last batch.
        cut_short = not trainer.is_last_batch and self._saved_at == _place(trainer)
        due = self._schedule.by_epoch or is_stopping(trainer) or is_last_epoch(trainer)
        if due and not cut_short and not trainer.fast_dev_run:
            self._save(trainer, block="staged")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        session = self._running
        session.fence()
        if self._saved_at != _place(trainer) and not trainer.fast_dev_run:
            self._save(trainer, block="staged")
        session.wait()
        trainer.strategy.barrier("the last generation is committed")  # for those who look at once
        self._best = self._best_of(self._options.committed())
        report_last(session, trainer)  # last: a user's logger may raise

    @override
    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if self._session is None:
            return
        try:
            self._session.fence()
            if is_sigterm(exception):
                self._save_now(trainer)
        finally:
            if is_sigterm(exception):
                # Lightning would end with 0, so that a supervisor believes the job was done.
                exception.code = _SIGTERM_CODE  # type: ignore[attr-defined]
            self._end()

    @override
    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        # Not after an exception: the signal may still be on its way to this rank.
        self._sigterm.release()
        self._end()

    # ── the work ──────────────────────────────────────────────────────────────────────────────

    @property
    def _running(self) -> Session:
        if self._session is None:
            raise RuntimeError("CheckpointCallback.setup(trainer, ...) must come first")
        return self._session

    def _due(self, trainer: Trainer, step: int) -> bool:
        due = self._schedule.step_due(step)
        if self._schedule.every_minutes is not None and not due:
            # Clocks differ between ranks; rank 0's counts.
            due = trainer.strategy.broadcast(self._schedule.time_due())
        return bool(due)

    def _save(self, trainer: Trainer, *, block: Literal["copied", "staged"]) -> PendingSave:
        extra: dict[str, Any] = {"step": trainer.global_step, "metrics": self._metrics.state()}
        if self._exact is not None:
            extra["exact"] = PerRank(self._exact.state_dict(trainer))
        pending = self._running.save(block=block, metrics=self._metrics.fresh(trainer), extra=extra)
        self._saved_at = _place(trainer)
        self._schedule.saved(trainer.global_step)
        return pending

    def _save_now(self, trainer: Trainer) -> None:
        """Save where training was interrupted, and wait until it is durable."""
        try:
            latest = self._running.latest
            if self._saved_at != _place(trainer) or latest is None or latest.error is not None:
                latest = self._save(trainer, block="staged")
            latest.wait()
        except CkptError as error:
            logger.error("nothing was saved on SIGTERM: %s", error)

    def _loaded(self, extra: dict[str, Any]) -> None:
        self._resumed_step = extra["step"]
        self._metrics.load_state(extra["metrics"])
        if self._exact is None or "exact" not in extra:
            return
        mine, trainer = extra["exact"], self._running.trainer
        if mine is None or mine["world_size"] != trainer.world_size:  # on all ranks, or on none
            mine = trainer.strategy.broadcast(mine)  # rank 0 has one, whatever their number was
        self._exact.load_state_dict(mine)

    def _best_of(self, committed: list[Generation]) -> str:
        best = self._metrics.best(committed)
        return best.url if best is not None else ""

    def _end(self) -> None:
        session, self._session = self._session, None
        self._resume.forget()
        if session is not None:
            if self._exact is not None:
                self._exact.teardown(session.trainer)
            session.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """For `ddp_spawn`: the options travel, the engine stays."""
        return _rebuilt, (twins.without_bases(type(self)), self._given)


def _rebuilt(kind: type[CheckpointCallback], given: dict[str, Any]) -> CheckpointCallback:
    return kind(**given)


def _place(trainer: Trainer) -> tuple[int, int]:
    """Where in training this is: optimizer steps and batches, of which some only add gradients."""
    return trainer.global_step, trainer.fit_loop.total_batch_idx
