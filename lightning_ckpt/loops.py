"""The inside of Lightning's training loops, as far as exact resume must read and set it.

The only file that touches their private attributes, and the one that says so when a Lightning
lacks them. Knows both twins by the shape of their trainer, never by its class. Knows nothing of
random state, of data, or of what is stored.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch_ckpt import ConfigError

logger = logging.getLogger(__name__)

Phase = Literal[
    "boundary",  # between two epochs, or before the first
    "between",  # between two batches
    "in_step",  # a batch was fetched, its step did not end
    "batch_end",  # in on_train_batch_end: validation and the rest of this iteration are to come
    "in_validation",  # validation began, and did not end
    "validated",  # in on_validation_end: the rest of this iteration is to come
    "epoch_end",  # in on_train_epoch_end: epoch schedulers and epoch logs are to come
]

_NEEDED = {
    "fit": (
        "setup_data",
        "on_iteration_done",
        "epoch_progress",
        "_combined_loader",
        "_data_fetcher",
        "_data_source",
        "_last_train_dl_reload_epoch",
        "_load_combined_loader_states",
        "_restart_stage",
    ),
    "epoch": (
        "on_run_start",
        "on_advance_end",
        "update_lr_schedulers",
        "batch_progress",
        "scheduler_progress",
        "automatic_optimization",
        "manual_optimization",
        "_should_accumulate",
        "_num_ready_batches_reached",
        "_batches_that_stepped",
        "_restarting",
        "_restart_stage",
        "_results",
        "_skip_next_val",
    ),
    "validation": ("batch_progress", "setup_data", "_combined_loader", "_last_val_dl_reload_epoch"),
    "connector": (
        "on_batch_end",
        "on_epoch_end",
        "update_train_step_metrics",
        "update_train_epoch_metrics",
        "_callback_metrics",
        "_logged_metrics",
        "_progress_bar_metrics",
        "_first_loop_iter",
        "_current_fx",
    ),
}


class Loops:
    """One trainer's fit loop, its epoch loop, its validation loop, and its logger connector."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.fit = trainer.fit_loop
        self.epoch = self.fit.epoch_loop
        self.validation = self.epoch.val_loop
        self.connector = trainer._logger_connector
        missing = [
            f"{part}.{name}"
            for part, names in _NEEDED.items()
            for name in names
            if not hasattr(getattr(self, part), name)
        ]
        if missing:
            raise ConfigError(
                f"exact resume knows the loops of Lightning 2.5.5 to 2.6, and this one has no "
                f"{', '.join(missing)}; pin lightning<2.7, or turn exact resume off"
            )

    # ── where training stands ─────────────────────────────────────────────────────────────────

    @property
    def batches(self) -> int:
        """Batches of this epoch that were handed to training steps."""
        return self.epoch.batch_progress.current.ready

    def phase(self, *, validated: bool) -> Phase:
        """What was going on when this was asked; `validated`: on_validation_end has begun."""
        epoch, batch = self.fit.epoch_progress.current, self.epoch.batch_progress.current
        if epoch.started == epoch.processed:
            return "epoch_end" if epoch.processed > epoch.completed else "boundary"
        if batch.ready > batch.processed:
            return "in_step"
        if batch.processed > batch.completed:
            return "batch_end"
        if self.trainer.validating:
            return "validated" if validated else "in_validation"
        return "between"

    def counters(self) -> dict[str, Any]:
        """Every progress counter, as plain numbers."""
        return {
            "progress": {name: part.state_dict() for name, part in self._progress()},
            "batches_that_stepped": self.epoch._batches_that_stepped,
            "train_loaded_in_epoch": self.fit._last_train_dl_reload_epoch,
            "validation_loaded_in_epoch": self.validation._last_val_dl_reload_epoch,
        }

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Put back what `counters` returned."""
        for name, part in self._progress():
            part.load_state_dict(counters["progress"][name])
        self.epoch._batches_that_stepped = counters["batches_that_stepped"]
        self.fit._last_train_dl_reload_epoch = counters["train_loaded_in_epoch"]
        self.validation._last_val_dl_reload_epoch = counters["validation_loaded_in_epoch"]

    def _progress(self) -> Iterator[tuple[str, Any]]:
        yield "epoch", self.fit.epoch_progress
        yield "batch", self.epoch.batch_progress
        yield "scheduler", self.epoch.scheduler_progress
        yield "optimizer", self.epoch.automatic_optimization.optim_progress
        yield "manual", self.epoch.manual_optimization.optim_step_progress
        yield "validation", self.validation.batch_progress

    # ── the data ──────────────────────────────────────────────────────────────────────────────

    @property
    def fetcher(self) -> Any:
        """Lightning's data fetcher of the training loaders."""
        return self.fit._data_fetcher

    @property
    def reads_ahead(self) -> bool:
        """Whether a batch is fetched before the one that precedes it is trained on."""
        return self.fetcher.length is None and hasattr(self.fetcher, "batches")

    @property
    def combined(self) -> Any:
        """The CombinedLoader of the training loaders; None before they were made."""
        return self.fit._combined_loader

    @property
    def train_loaders(self) -> list[Any]:
        """The training loaders, flat; those given to `fit` when none were made yet."""
        if self.combined is not None:
            return list(self.combined.flattened)
        return list(_flat(self.fit._data_source.instance))

    @property
    def validation_loaders(self) -> list[Any]:
        """The validation loaders, flat; empty before they were made."""
        combined = self.validation._combined_loader
        return [] if combined is None else list(combined.flattened)

    @property
    def iteration(self) -> Any:
        """An object that is another one whenever the loaders were iterated anew."""
        return None if self.combined is None else self.combined._iterator

    @property
    def iterators(self) -> list[Callable[[], Any]]:
        """References to the iterator of each loader, in this epoch; they keep no workers alive."""
        return [] if self.iteration is None else [_reference(i) for i in self.iteration.iterators]

    def fetched(self, phase: Phase) -> int | None:
        """How many batches a step that fetches for itself has fetched; None for all other steps."""
        if not hasattr(self.fetcher, "iterator_wrapper"):
            return None
        return self.fetcher.fetched - (1 if phase == "in_step" else 0)

    def make_validation_loaders(self) -> None:
        """Make the validation loaders now, as the loop would at its first validation."""
        self.trainer.validating = True
        try:
            self.validation.setup_data()
        finally:
            self.trainer.training = True

    def drop_train_loaders(self) -> None:
        """Forget the training loaders, so that `setup_data` makes them again."""
        if self.combined is not None:
            self.combined.reset()
        self.fit._combined_loader = None

    def pass_unread(self, count: int, *, last: bool) -> None:
        """Tell Lightning that `count` batches went by; `last`: the epoch has no more."""
        fetcher = self.fetcher
        fetcher.fetched += count
        self.iteration._idx = count
        fetcher.done = last or (fetcher.length is not None and fetcher.fetched >= fetcher.length)

    # ── being called back ─────────────────────────────────────────────────────────────────────

    def intercept(
        self,
        *,
        setup_data: Callable[[], None],
        before_first_iteration: Callable[[], None],
        on_run_start: Callable[[Any], None],
    ) -> None:
        """Call these instead of the loops' own methods of (nearly) those names, in this trainer."""
        self.release()
        self.fit.setup_data = setup_data
        self.fit._load_combined_loader_states = before_first_iteration
        self.epoch.on_run_start = on_run_start

    def release(self) -> None:
        """Undo `intercept`."""
        for loop, name in (
            (self.fit, "setup_data"),
            (self.fit, "_load_combined_loader_states"),
            (self.epoch, "on_run_start"),
        ):
            vars(loop).pop(name, None)

    def own(self, name: Literal["setup_data", "load_states", "on_run_start"]) -> Callable[..., Any]:
        """The loops' own method, not the one put in its place."""
        loop, method = {
            "setup_data": (self.fit, "setup_data"),
            "load_states": (self.fit, "_load_combined_loader_states"),
            "on_run_start": (self.epoch, "on_run_start"),
        }[name]
        return getattr(type(loop), method).__get__(loop)

    # ── going on from where it was ────────────────────────────────────────────────────────────

    def forget_restart(self) -> None:
        """Take back Lightning's own guess of where the run was interrupted."""
        for loop in (self.fit, self.epoch, self.validation):
            loop.on_iteration_done()
            loop._restarting = False

    def enter_epoch_again(self) -> None:
        """Make the fit loop go into the running epoch, without its start hooks."""
        self.forget_restart()
        self.fit._restart_stage = "restarted_mid_epoch"
        self.epoch._restart_stage = "restarted_on_last"  # so that it counts nothing on its own
        self.epoch._restarting = True
        warnings.filterwarnings("ignore", message=".*ended before the epoch ended.*not resumable")

    def renumber(self, batches: int) -> None:
        """Count this epoch on from `batches`; what is counted over all epochs stays."""
        current = self.epoch.batch_progress.current
        current.ready = current.started = current.processed = current.completed = batches

    def finish(self, phase: Phase, *, checked_every: float | None = None) -> None:
        """Run what the interrupted iteration still had to do at `phase`, with Lightning's code.

        Where counters are those of another number of ranks, so must be `checked_every`: after how
        many batches a validation follows.
        """
        present = self.trainer.val_check_batch
        if checked_every is not None and present is not None:
            self.trainer.val_check_batch = checked_every
        try:
            self._finish(phase)
        finally:
            self.trainer.val_check_batch = present

    def _finish(self, phase: Phase) -> None:
        if phase == "batch_end":
            self.connector.on_batch_end()
            self.epoch.batch_progress.increment_completed()
            self.connector.update_train_step_metrics()
            self.epoch.on_advance_end(self.fetcher)
        elif phase == "validated":
            self.epoch._skip_next_val = True
            self.epoch.on_advance_end(self.fetcher)
        elif phase == "in_validation":
            self.epoch.on_advance_end(self.fetcher)
        elif phase == "epoch_end":
            self._finish_epoch()

    def _finish_epoch(self) -> None:
        """The end of `FitLoop.on_advance_end`, after its hooks."""
        self.connector.on_epoch_end()
        if self.epoch._num_ready_batches_reached():
            self.epoch.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        self.epoch._batches_that_stepped -= 1
        self.connector.update_train_epoch_metrics()
        self.epoch._batches_that_stepped += 1
        self.fit.epoch_progress.increment_completed()

    def waiting(self, batch: dict[str, Any]) -> int:
        """At the end of how many batches no step was taken yet; `batch` is their counter."""
        if batch["is_last_batch"] or not self.trainer.lightning_module.automatic_optimization:
            return 0
        return batch["current"]["ready"] % self.trainer.accumulate_grad_batches

    def accumulating(self) -> bool:
        """Whether the gradients of this batch wait for those of later ones."""
        return bool(self.epoch._should_accumulate())


def rewound(counters: dict[str, Any], *, epoch: bool) -> dict[str, Any]:
    """The counters before what was begun and not completed; `epoch`: an epoch too, not a batch."""
    progress = {name: _rewound(part) for name, part in counters["progress"].items()}
    if not epoch:
        progress["epoch"] = counters["progress"]["epoch"]
        progress["batch"]["is_last_batch"] = False
    return {**counters, "progress": progress}


def _rewound(part: dict[str, Any]) -> dict[str, Any]:
    done = part.get("completed")
    return {
        key: _rewound(value)
        if isinstance(value, dict)
        else (done if key in ("ready", "started", "processed") else value)
        for key, value in part.items()
    }


def _reference(iterator: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(iterator)
    except TypeError:  # a builtin one, such as a list's
        return lambda: iterator


def _flat(loaders: Any) -> Iterator[Any]:
    if isinstance(loaders, dict):
        loaders = loaders.values()
    elif hasattr(loaders, "flattened"):
        loaders = loaders.flattened
    elif not isinstance(loaders, list | tuple):
        if hasattr(loaders, "dataset"):
            yield loaders
        return
    for item in loaders:
        yield from _flat(item)
