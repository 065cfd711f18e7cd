"""`TrainerCheckpoint`: a Hugging Face Trainer saves and resumes through the engine.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[TrainerCheckpoint("runs/7")])
    trainer.train()                     # from the newest good generation, if there is one

Everything is changed on that one Trainer. Knows hooks and options. Knows nothing of how a save is
done or which generation is good.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch_ckpt import (
    Checkpointer,
    CkptError,
    ConfigError,
    EncodingOptions,
    KeepBest,
    KeepLast,
    Retention,
)

try:
    import transformers
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "TrainerCheckpoint needs Transformers: pip install 'torch-ckpt[transformers]'"
    ) from error

from typing_extensions import Self, Unpack, override

from accelerate_ckpt.plugin import rule_of
from accelerate_ckpt.trainer_run import Run, SteppedBack
from accelerate_ckpt.trainer_state import BEST, refuse_kind
from accelerate_ckpt.trainer_stop import SIGTERM_CODE
from accelerate_ckpt.trainer_version import check_transformers

logger = logging.getLogger(__name__)

_ENGINE_OPTIONS = (
    "archive",
    "cache",
    "keep_archive",
    "permanent_every",
    "archive_options",
    "archive_timeout_s",
    "bandwidth_limit",
    "mode",
    "slabs",
    "on_busy",
    "on_error",
    "writer_timeout_s",
    "commit_timeout_s",
    "allow_pickle",
    "storage_options",
)


class TrainerCheckpoint(TrainerCallback):
    """Saves the whole run where the Trainer would have, and starts from the newest good generation.

    Run the same script again after any crash: it goes on where the run was. A path given to
    `train(resume_from_checkpoint=...)` wins, be it a generation of this run or a folder that the
    Trainer itself wrote. When to save is the Trainer's `save_strategy`. One root belongs to one
    run and one Trainer. On SIGTERM it saves after the step under way, and `train` ends by
    SystemExit(143); with `enable_jit_checkpoint` it returns.

    Args:
        root: folder or fsspec URL for the generations of this run, the same for all ranks.
        archive, cache: folder or URL to which generations go on, and a folder on each node's disk.
        keep: which generations stay, as a rule or in words (`last=3,every=1000`, `all`); without
            it `save_total_limit` newest ones. That of the best model stays in any case.
        resume: "never" starts afresh, or where `train(resume_from_checkpoint=...)` says.
        overlap: copy behind forward and backward; off, a save copies everything at once.
        skip: "fast" leaves batches already seen unread where that need not be exact.
        strict: whether a generation that does not fit the model or optimizer is an error.
        mode: "sync" makes every save durable before training goes on.
        slabs: snapshots in host memory at once.
        on_busy: what a save does while all slabs are being written: wait, or be left out.
        on_error: "raise" lets a failed save stop training at the next one.
        writer_timeout_s: how long a silent writer is believed to be alive.
        commit_timeout_s: how long a save may take to become durable.
        allow_pickle: whether resuming may unpickle custom objects.
        storage_options: for fsspec, where `root` is a URL.
        keep_archive, permanent_every, archive_options, archive_timeout_s, bandwidth_limit: of the
            archive, as in `torch_ckpt.Checkpointer`.
        encoding: `codec`, `incremental` and the others that make generations smaller, as there.

    Raises:
        ConfigError: an option cannot be used, or (by the Trainer) a way of distributing.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        archive: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        keep: Retention | str | None = None,
        resume: Literal["auto", "never"] = "auto",
        overlap: bool = True,
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
        given = locals()
        self._engine_options = {**{name: given[name] for name in _ENGINE_OPTIONS}, **encoding}
        for name, value, choices in (
            ("resume", resume, ("auto", "never")),
            ("skip", skip, ("exact", "fast")),
        ):
            if value not in choices:
                wanted = " or ".join(map(repr, choices))
                raise ConfigError(f"{name} must be {wanted}, got {value!r}")
        self._root, self._keep, self._resume = _as_text(root), rule_of(keep), resume
        self._overlap, self._exact, self._strict = overlap, skip == "exact", strict
        self._trainer: Any = None
        self._stock: dict[str, Callable[..., Any]] = {}
        self._run: Run | None = None
        Checkpointer(root, distributed=False, **self._engine_options).close()  # refuses now

    def attach(self, trainer: Any) -> Self:
        """Take over the checkpoints of a Trainer that was made without `callbacks=[...]`.

        Raises:
            ConfigError: this Transformers or a way of distributing cannot be served.
        """
        if trainer is self._trainer:
            return self
        if self._trainer is not None:
            raise ConfigError("a TrainerCheckpoint serves one Trainer; make another one")
        check_transformers()
        refuse_kind(trainer)
        self._trainer = trainer
        replaced: dict[str, Callable[..., Any]] = {
            "train": self._train,
            "_save_checkpoint": self._save_checkpoint,
            "_load_from_checkpoint": partial(self._load, "_load_from_checkpoint"),
            "_load_optimizer_and_scheduler": partial(self._load, "_load_optimizer_and_scheduler"),
            "_load_scaler": partial(self._load, "_load_scaler"),
            "_load_rng_state": partial(self._load, "_load_rng_state"),
            "_run_epoch": self._run_epoch,
            "_load_best_model": self._load_best_model,
            "_finalize_training": self._finalize_training,
        }
        for name, method in replaced.items():
            self._stock[name] = getattr(trainer, name)
            setattr(trainer, name, method)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    # ── hooks ─────────────────────────────────────────────────────────────────────────────────

    @override
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attach(_trainer_that_calls(self))

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is None:
            raise ConfigError(
                "this TrainerCheckpoint knows no Trainer: give it to Trainer(callbacks=[...]), or "
                "call attach(trainer) before train()"
            )
        self._run.begin()

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._running.stop.decide():
            # Here and not at once: the step is whole, and an evaluation that is due comes first.
            control.should_save = control.should_training_stop = True

    # ── in place of the Trainer's own ─────────────────────────────────────────────────────────

    @property
    def _running(self) -> Run:
        if self._run is None:
            raise ConfigError("the Trainer saves and loads through the engine while it trains only")
        return self._run

    def _train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if trial is not None:
            raise ConfigError(
                "TrainerCheckpoint does not serve hyperparameter_search: trials would share a root"
            )
        again = self._trainer.args.eval_on_start
        run = self._run = self._new_run()
        try:
            run.stop.watch(self._trainer)
            while True:
                start = self._start(run, resume_from_checkpoint)
                # An evaluation that the run has had would be one too many for its callbacks.
                self._trainer.args.eval_on_start = again and not run.is_mine(start)
                try:
                    result = self._stock["train"](start, None, *args, **kwargs)
                    break
                except SteppedBack:
                    logger.warning("starting again from an earlier generation")
        finally:
            self._trainer.args.eval_on_start = again
            self._end(failed=sys.exc_info()[0] is not None)
        if (run.stop.received or run.stop.decided) and not run.stop.graceful:
            raise SystemExit(SIGTERM_CODE)  # 0 would tell a supervisor that the job was done
        return result

    def _new_run(self) -> Run:
        engine = Checkpointer(
            self._root,
            keep=self._retention(),
            framework={"transformers": transformers.__version__},
            **self._engine_options,
        )
        return Run(
            self._trainer,
            self._stock,
            engine,
            root=self._root,
            overlap=self._overlap,
            exact=self._exact,
            strict=self._strict,
        )

    def _retention(self) -> Retention | None:
        limit = self._trainer.args.save_total_limit
        keep: Any = self._keep
        if keep is None and limit is not None and limit > 0:
            keep = KeepLast(limit)
        if not isinstance(keep, Retention):
            return None
        return keep | KeepBest(BEST, 1, "max")

    def _start(self, run: Run, asked: Any) -> Any:
        """Where to start, in words that the Trainer knows."""
        if asked in (None, False):
            return run.choose() if self._resume == "auto" else None
        if asked is True:
            return run.choose() or True  # True: a folder that the Trainer itself wrote
        path = Path(asked).expanduser()
        known = {one.folder: one.step for one in run.engine.generations()}
        if path.name in known and not (path / "trainer_state.json").exists():
            return run.choose(known[path.name])
        if (path / "manifest.json").exists():
            raise ConfigError(
                f"{path} is a generation of another run; give its root to TrainerCheckpoint, or "
                "write it as a folder for the Trainer with `torch-ckpt export --to hf`"
            )
        return asked

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        self._running.save(model)

    def _load(self, name: str, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        """What the Trainer reads from a checkpoint's folder."""
        run = self._run
        if run is None or not run.is_mine(checkpoint):
            return self._stock[name](checkpoint, *args, **kwargs)
        if name == "_load_optimizer_and_scheduler":
            run.fill()  # all that was prepared is there now
        elif name == "_load_rng_state":
            run.restore_random()
        return None

    def _run_epoch(self, **arguments: Any) -> None:
        self._running.run_epoch(**arguments)

    def _load_best_model(self) -> None:
        self._running.load_best()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Without its own pruning, which goes by folders that are none of this run's."""
        limit, self._trainer.args.save_total_limit = self._trainer.args.save_total_limit, None
        try:
            return self._stock["_finalize_training"](*args, **kwargs)
        finally:
            self._trainer.args.save_total_limit = limit

    def _end(self, *, failed: bool) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.close()
        except CkptError as error:
            if self._engine_options["on_error"] == "raise" and not failed:
                raise
            logger.error("%s", error)


def _as_text(root: str | os.PathLike[str]) -> str:
    text = os.fspath(root)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _trainer_that_calls(callback: TrainerCallback) -> Any:
    """The Trainer whose constructor calls a hook, which is given everything but the Trainer."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        handler = getattr(found, "callback_handler", None)
        if handler is not None and callback in handler.callbacks:
            return found
        frame = frame.f_back
    raise ConfigError("no Trainer calls this; use TrainerCheckpoint(...).attach(trainer)")
