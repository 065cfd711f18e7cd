"""One `train()` of one Trainer: where it starts, what is saved, and how it ends.

The Trainer is given a folder that holds nothing but its own counters; where it would read the rest
of a checkpoint from there, this fills the live objects from the engine instead. Knows a Trainer's
methods and the engine. Knows nothing of hooks and options.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

from accelerate_ckpt.loaders import Places
from accelerate_ckpt.trainer_layout import Staging
from accelerate_ckpt.trainer_state import BEST, KEY, Received, Weights, Whole
from accelerate_ckpt.trainer_stop import Stop
from torch_ckpt import (
    Checkpointer,
    CkptError,
    DisagreementError,
    FormatError,
    Generation,
    GenerationNotFound,
    IntegrityError,
    PendingSave,
    SnapshotTorn,
    StateMismatch,
    StorageError,
)

logger = logging.getLogger(__name__)

_DAMAGE = (IntegrityError, FormatError, StorageError, DisagreementError)
_STATE = "trainer_state.json"


class SteppedBack(Exception):
    """The generation that training was to start from is damaged: begin again, with another."""


class Run:
    """Holds the engine for one `train()`."""

    def __init__(
        self,
        trainer: Any,
        stock: Mapping[str, Callable[..., Any]],
        engine: Checkpointer,
        *,
        root: str,
        overlap: bool,
        exact: bool,
        strict: bool,
    ) -> None:
        self.trainer, self.engine, self.root, self.stop = trainer, engine, root, Stop()
        self._stock, self._eager, self._strict = stock, not overlap, strict
        self._loaders: list[Any] = []
        self._places = Places(lambda: self._loaders, exact=exact)
        self._generation: Generation | None = None
        self._header: dict[str, Any] = {}
        self._folder: Path | None = None
        self._whole: Whole | None = None
        self._replays = False
        self._staging: Staging | None = None
        self._saves: list[PendingSave] = []
        self._best: int | None = None

    # ── where it starts ───────────────────────────────────────────────────────────────────────

    def choose(self, step: int | None = None) -> str | None:
        """What to tell the Trainer to resume from; None if there is no generation yet.

        Raises:
            NothingUsable: there are generations, and none can be used.
            StateMismatch: the newest was not saved by a Trainer.
        """
        header = Received()
        generation = self.engine.resume({KEY: header}, step=step, strict=False)
        self._generation, self._header = generation, header.state
        if generation is None:
            return None
        if not header.state:
            raise StateMismatch(where=generation.url, missing=[KEY])
        if header.state["world_size"] != self.trainer.args.world_size:
            logger.warning(
                "%s was saved on %d ranks and is loaded on %d: weights and optimizer are the "
                "same, random states are derived, and the epoch goes on after as many samples",
                generation.url,
                header.state["world_size"],
                self.trainer.args.world_size,
            )
        state = json.loads(header.state["trainer_state"])
        state["best_model_checkpoint"] = None  # found again in `begin`, wherever the run lies now
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="trainer-ckpt-"))
        self._folder.mkdir(exist_ok=True)
        (self._folder / _STATE).write_text(json.dumps(state), encoding="utf-8")
        return str(self._folder)

    def is_mine(self, path: Any) -> bool:
        """Whether the Trainer means what `choose` gave it."""
        return self._folder is not None and os.fspath(path or "") == str(self._folder)

    def fill(self) -> None:
        """Load model, optimizer, scheduler and scaler; what comes later is kept for its time.

        Raises:
            SteppedBack: on all ranks, if the generation turned out to be damaged.
            StateMismatch: it does not fit.
        """
        whole = Whole(self.trainer, self._places)
        structure = whole.to_fill()
        chosen = self._generation
        if chosen is None:
            raise RuntimeError("choose() must come first")
        try:
            generation = self.engine.load(structure, folder=chosen.folder, strict=self._strict)
        except _DAMAGE:
            found = self.engine.resume(structure, strict=self._strict)  # marks the damaged one
            if found is None or found.id != chosen.id:
                raise SteppedBack from None
            generation = found
        self._whole = whole
        logger.info("goes on after step %d (%s)", generation.step, generation.url)

    def begin(self) -> None:
        """Everything that the Trainer has just set to nothing; before its first step."""
        trainer, whole = self.trainer, self._whole
        self.stop.join()
        if self._folder is not None and not trainer.args.auto_find_batch_size:
            # From here on only its name is asked for, and a kill would leave it behind.
            shutil.rmtree(self._folder, ignore_errors=True)
        self.engine.set_aside(newer_than=trainer.state.global_step)
        if whole is not None:
            whole.loop.put_back(trainer)
            whole.buffers.put_back()
            self._restore_callbacks()
            self._restore_best()
        elif trainer.state.global_step == 0:
            logger.info("there is no generation yet: this run starts afresh")
        self._staging = Staging(trainer, self._stock["_save_checkpoint"])
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self.engine.prepare({"model": Weights(trainer), "optimizer": optimizer})

    def restore_random(self) -> None:
        """In place of `_load_rng_state`: the random state at the save."""
        if self._whole is not None and not self._replays:
            self._whole.random.put_back()

    def _restore_callbacks(self) -> None:
        """What early stopping and the like had counted; stock only does so if it is asked to."""
        trainer = self.trainer
        if trainer.args.restore_callback_states_from_checkpoint:
            return
        waiting = {name: _listed(one) for name, one in trainer.state.stateful_callbacks.items()}
        for callback in trainer.callback_handler.callbacks:
            saved = waiting.get(type(callback).__name__)
            if saved and callable(getattr(callback, "state", None)):
                for name, value in saved.pop(0).get("attributes", {}).items():
                    setattr(callback, name, value)

    def _restore_best(self) -> None:
        self._best = self._header["best"]
        if self._best is None:
            return
        found = self._committed(self._best)
        if found is None:
            logger.warning(
                "the best model's generation (step %d) is not there any more", self._best
            )
        self.trainer.state.best_model_checkpoint = None if found is None else found.url

    def _committed(self, step: int) -> Generation | None:
        usable = (one for one in self.engine.generations() if one.step == step)
        return next((one for one in usable if not one.tags.keys() & {"damaged", "aside"}), None)

    # ── an epoch ──────────────────────────────────────────────────────────────────────────────

    @property
    def ended(self) -> bool:
        """Whether what was resumed is a run that had come to its end."""
        state = self.trainer.state
        if self._whole is None or self._header["step"] != state.global_step:
            return False
        return bool(self._header["stopped"]) or state.global_step >= state.max_steps

    def run_epoch(self, **arguments: Any) -> None:
        """In place of `_run_epoch`, whose place in the data is found exactly."""
        if self.ended:
            self.trainer.control.should_training_stop = True
            return
        loader = arguments["train_dataloader"]
        batches = arguments["steps_trained_in_current_epoch"]
        first = arguments["epoch"] == arguments["epochs_trained"]
        self._replays = False
        if not self._loaders:
            self._loaders = [loader]
            watch = self._places.watch(loader)
            if first and self._whole is not None:
                self._find_place(arguments["epoch"], batches)
                pending = None if watch is None else watch.pending
                self._replays = bool(batches and pending is not None and pending.begin is not None)
        with _skipping_with(self._skip, wanted=self._replays):
            self._stock["_run_epoch"](**arguments)

    def _find_place(self, epoch: int, batches: int) -> None:
        """Send the loader there; where the Trainer passes over nothing, an epoch begins."""
        for place in self._places.loaded or []:
            if place is not None and not batches:
                place.update(epoch=epoch, batch=0, ended=False)
        self._places.put_back()

    def _skip(self, stock: Callable[..., Any], loader: Any, batches: int = 0) -> Any:
        mine = self._loaders and loader is self._loaders[0]
        return self._places.skip(loader, batches) if mine else stock(loader, batches)

    # ── saving ────────────────────────────────────────────────────────────────────────────────

    def save(self, model: Any) -> None:
        """In place of `_save_checkpoint`; all ranks call it."""
        trainer, state = self.trainer, self.trainer.state
        if self._staging is None:
            raise RuntimeError("training has not begun")
        self._settle()
        step = state.global_step
        if state.best_global_step and state.best_global_step == step:
            self._best = step
        whole = Whole(trainer, self._places)
        before = state.best_model_checkpoint
        staged = self._staging.take(model, whole.files)
        # The Trainer has taken the folder it wrote into for one that stays.
        state.best_model_checkpoint = before
        if self._best == step:
            state.best_model_checkpoint = f"{self.root}/step-{step:010d}"
        stops = trainer.control.should_training_stop and not self.stop.decided
        header = {
            "transformers": transformers.__version__,
            "step": step,
            "world_size": trainer.args.world_size,
            "trainer_state": staged.trainer_state,
            "weights": staged.weights,
            "best": self._best,
            "stopped": bool(stops and step < state.max_steps),
        }
        pending = self.engine.save(
            whole.to_save(header),
            step,
            block="staged" if self._eager or self.stop.decided else None,
            metrics=self._metrics(step),
        )
        self._saves.append(pending)
        if self.stop.decided:
            self._wait()

    def _metrics(self, step: int) -> dict[str, float]:
        """The numbers measured on what is saved."""
        found: dict[str, float] = {BEST: float(step)} if self._best == step else {}
        for line in self.trainer.state.log_history[-8:]:
            if line.get("step") == step:
                numbers = {k: v for k, v in line.items() if k.startswith("eval_")}
                found |= {k: float(v) for k, v in numbers.items() if type(v) in (int, float)}
        return found

    def _settle(self) -> None:
        """Look what became of earlier saves."""
        done = [save for save in self._saves if save.done]
        self._saves = [save for save in self._saves if not save.done]
        if not self._eager and any(isinstance(save.error, SnapshotTorn) for save in done):
            self._eager = True
            logger.warning(
                "something other than the optimizer changes the state between steps, so from now "
                "on a save copies everything before training goes on"
            )

    def load_best(self) -> None:
        """In place of `_load_best_model`."""
        if self._best is None:
            self._stock["_load_best_model"]()
            return
        try:
            weights = {"model": Weights(self.trainer)}
            generation = self.engine.load(weights, self._best, strict=False)
        except (GenerationNotFound, *_DAMAGE) as error:
            logger.error("the best model is not loaded, the last one stays: %s", error)
            return
        logger.info("loaded the best model, of step %d (%s)", generation.step, generation.url)

    # ── the end ───────────────────────────────────────────────────────────────────────────────

    def _wait(self) -> None:
        try:
            self.engine.wait()
        except CkptError as error:
            logger.error("%s", error)

    def close(self) -> None:
        """Finish every save and give everything back.

        Raises:
            SaveFailed: a save failed and no earlier call has raised it.
        """
        self.stop.release()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self.engine.close()


@contextmanager
def _skipping_with(skip: Callable[..., Any], *, wanted: bool) -> Iterator[None]:
    """Have the Trainer pass over batches with `skip`, once: it has no method for that."""
    module: Any = sys.modules[transformers.Trainer.__module__]
    stock = module.skip_first_batches

    def once(loader: Any, batches: int = 0) -> Any:
        module.skip_first_batches = stock
        return skip(stock, loader, batches)

    if wanted:
        module.skip_first_batches = once
    try:
        yield
    finally:
        module.skip_first_batches = stock


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
