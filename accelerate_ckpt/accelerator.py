"""Checkpoints of one Accelerator: its `save_state` and `load_state` go through the engine.

    attached = attach(accelerator, CheckpointPlugin(root="runs/7"))
    position = attached.resume()        # the newest good generation; None on a first run
    accelerator.save_state()            # copied, and written behind training
    attached.close()                    # or accelerator.end_training()

Everything is changed on that one instance. Knows the Accelerator and the order of things. Knows
nothing of how a save is done or which generation is good.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from typing_extensions import Self

from accelerate_ckpt.folders import default_root, generation_name, name_to_load, result_path
from accelerate_ckpt.hooks import run_load_hooks, run_save_hooks
from accelerate_ckpt.loaders import Places, Position
from accelerate_ckpt.plugin import CheckpointPlugin, CkptProjectConfiguration
from accelerate_ckpt.state import KIND, Whole, refuse_kind
from accelerate_ckpt.stock import StockFolder, StockIncomplete
from accelerate_ckpt.version import check_version
from torch_ckpt import (
    Checkpointer,
    CkptError,
    ConfigError,
    Generation,
    GenerationNotFound,
    PendingSave,
    StateMismatch,
)

logger = logging.getLogger(__name__)

_ATTACHED = "_ckpt_attached"
_owners: dict[str, weakref.ref[Attached]] = {}
"""Who writes into a root in this process: the Accelerator that used it last."""


def attach(accelerator: Any, plugin: CheckpointPlugin | None = None) -> Attached:
    """Give an Accelerator checkpoints of the engine; every rank calls it.

    `save_state`, `load_state` and `skip_first_batches` of this instance then go through the engine.
    Without a plugin, that of a `CkptProjectConfiguration` is taken, or else the environment's.

    Raises:
        ConfigError: an option, this Accelerate, or a way of distributing cannot be served.
    """
    found = vars(accelerator).get(_ATTACHED)
    if found is not None and (plugin is None or found.plugin == plugin):
        return found
    if found is not None:
        found.close()
    check_version()
    refuse_kind(accelerator)
    configuration = accelerator.project_configuration
    if plugin is None and isinstance(configuration, CkptProjectConfiguration):
        plugin = configuration.ckpt
    return Attached(accelerator, plugin or CheckpointPlugin())


class Attached:
    """The checkpoints of one Accelerator. Made by `attach`."""

    def __init__(self, accelerator: Any, plugin: CheckpointPlugin) -> None:
        self.plugin = plugin
        self.position: Position | None = None
        """Where the run went on, once something was loaded."""
        self._accelerator = accelerator
        self._root = default_root(accelerator, plugin)
        self._engine: Checkpointer | None = None
        self._closed = False
        self._places = Places(lambda: accelerator._dataloaders, exact=plugin.skip != "fast")
        self._last = -1  # the number of the newest generation of this run
        self._saved_steps = 0
        self._adopt: int | None = None  # a step that was loaded by name, and becomes the line
        self._began = False
        self._stock: dict[str, Any] = {}
        self._patch()
        self._hook = register_optimizer_step_post_hook(self._stepped)
        if plugin.every:
            self._places.on_pause = self._save_if_due

    @property
    def root(self) -> str:
        """Where the generations are."""
        return self._root

    @property
    def step(self) -> int:
        """Optimizer steps taken, also before a restart."""
        return self._places.steps

    # ── saving ────────────────────────────────────────────────────────────────────────────────

    def save(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> PendingSave:
        """Save the Accelerator's state behind training, on every rank at the same time.

        Args:
            output_dir: its last part is the name of the generation's folder under the root.
            metrics: numbers to record; `KeepBest` ranks by them.

        Raises:
            UnsupportedState: something in the state cannot be saved; nothing was written.
            DisagreementError: not all ranks came within the plugin's `timeout_s`.
        """
        accelerator, engine = self._accelerator, self._open()
        self._begin_line(engine)
        configuration = accelerator.project_configuration
        folder = generation_name(configuration, output_dir, self._root)
        number = max(self.step, self._last + 1)
        whole = Whole(accelerator, self._places)
        weights: Any = whole.models
        if accelerator._save_model_state_pre_hook:
            weights = run_save_hooks(accelerator, whole.files)
        header = {
            "accelerate": accelerate.__version__,
            "step": accelerator.step,
            "optimizer_steps": self.step,
            "iteration": configuration.iteration,
            "world_size": accelerator.num_processes,
            "sync_gradients": accelerator.sync_gradients,
        }
        pending = engine.save(
            whole.to_save(header=header, weights=weights), number, folder=folder, metrics=metrics
        )
        configuration.iteration += 1
        self._last, self._saved_steps = number, self.step
        return pending

    def _save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """In place of `Accelerator.save_state`."""
        pending = self.save(output_dir)
        return result_path(self._root, pending.folder)

    def _save_if_due(self) -> None:
        if self.step - self._saved_steps >= (self.plugin.every or 0):
            self.save()

    def _begin_line(self, engine: Checkpointer) -> None:
        """Before the first save: which generations this run descends from, and which it leaves."""
        if self._adopt is not None:
            # Loads nothing: it makes the generation that was loaded by name the parent.
            engine.resume({}, step=self._adopt, strict=False)
        elif not self._began:
            left = engine.set_aside(newer_than=-1)
            if left:
                logger.warning(
                    "nothing was loaded before this save, so %d generations in %s belong to "
                    "another run: they stay, and are set aside. To go on with the newest one, "
                    "call accelerator.load_state() after accelerator.prepare(...)",
                    len(left),
                    self._root,
                )
        self._adopt, self._began = None, True

    # ── loading ───────────────────────────────────────────────────────────────────────────────

    def resume(self, *, strict: bool = True) -> Position | None:
        """Bring the run back to its newest good generation; None if there is none yet.

        Call it on every rank, after `accelerator.prepare` and `register_for_checkpointing`. A
        damaged generation is passed over. Where there is none, but a folder that stock Accelerate
        wrote, the newest complete one of these is loaded.

        Raises:
            NothingUsable: there are generations, and none can be used.
            StateMismatch: one does not fit what was prepared.
        """
        if self.plugin.resume == "never":
            return None
        engine = self._open()
        whole = self._whole(strict)
        generation = engine.resume(whole.to_fill(), strict=strict)
        if generation is None:
            return self._resume_stock()
        self._began, self._adopt = True, None
        return self._arrive(generation, whole)

    def load(self, input_dir: str | os.PathLike[str], *, strict: bool = True) -> Position:
        """Load one generation by its folder's name, or a folder that stock Accelerate wrote.

        What is newer is set aside by the next save.

        Raises:
            GenerationNotFound: there is neither.
            ConfigError: it is a generation of another root.
        """
        text = os.fspath(input_dir)
        stock = StockFolder.at(Path(text).expanduser()) if "://" not in text else None
        if stock is not None:
            return self._load_stock(stock)
        engine = self._open()
        whole = self._whole(strict)
        name = name_to_load(text, self._root)
        try:
            generation = engine.load(whole.to_fill(), folder=name, strict=strict)
        except GenerationNotFound as error:
            raise GenerationNotFound(
                f"{text} is neither a generation in {self._root} nor a folder that Accelerate's "
                f"save_state wrote completely ({error})"
            ) from error
        self._adopt = generation.step
        return self._arrive(generation, whole)

    def _load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """In place of `Accelerator.load_state`."""
        strict = bool(kwargs.get("strict", True))
        if input_dir is not None:
            self.load(input_dir, strict=strict)
        elif self.resume(strict=strict) is None:
            why = " that may be loaded (resume is 'never')" if self.plugin.resume == "never" else ""
            raise GenerationNotFound(
                f"{self._root} holds no generation yet{why}; on a first run, catch "
                "FileNotFoundError and begin"
            )

    def _whole(self, strict: bool) -> Whole:
        whole = Whole(self._accelerator, self._places)
        whole.models.strict = strict
        return whole

    def _arrive(self, generation: Generation, whole: Whole) -> Position:
        """Everything that has to come after the engine has filled what it can."""
        accelerator, header = self._accelerator, whole.header
        self._check(generation, whole)
        left: list[Any] = list(accelerator._models)
        if accelerator._load_model_state_pre_hook:
            left = run_load_hooks(accelerator, whole.files)
        lacking = [n for n in whole.models.absent if accelerator._models[n] in left]
        if lacking:
            raise StateMismatch(
                where=generation.url, missing=[f"models.{number}" for number in lacking]
            )
        accelerator.step = header["step"]
        accelerator.gradient_state._set_sync_gradients(header["sync_gradients"])
        accelerator.project_configuration.iteration = header["iteration"] + 1
        whole.gradients.put_back()
        whole.buffers.put_back()
        self._last = generation.step
        self._places.steps = self._saved_steps = header["optimizer_steps"]
        places = self._places.loaded or []
        epoch, batch = self._places.training_place(places)
        self._places.put_back()
        whole.random.put_back()  # last: everything before may have drawn
        self.position = Position(
            step=self.step, epoch=epoch, batch=batch, generation=generation.url
        )
        logger.info("goes on after step %d: epoch %d, batch %d", self.step, epoch, batch)
        return self.position

    def _check(self, generation: Generation, whole: Whole) -> None:
        ranks, now = whole.header.get("world_size"), self._accelerator.num_processes
        if ranks is None:
            raise StateMismatch(where=generation.url, missing=[KIND])
        if ranks != now and self._accelerator.is_main_process:
            logger.warning(
                "%s was saved on %d ranks and is loaded on %d: weights and optimizers are the "
                "same, random states are derived, the place in the data is after as many samples, "
                "and gradients that waited for more batches are gone",
                generation.url,
                ranks,
                now,
            )

    def _resume_stock(self) -> Position | None:
        """Load the newest complete folder that stock Accelerate wrote under the root."""
        found = [] if "://" in self._root else StockFolder.numbered(Path(self._root))
        for number, stock in enumerate(found):
            try:
                return self._load_stock(stock)
            except StockIncomplete as error:
                if number + 1 == len(found):
                    raise
                logger.error("stepping back from %s: %s", stock.path, error)
        return None

    def _load_stock(self, stock: StockFolder) -> Position:
        accelerator = self._accelerator
        stock.check(accelerator)
        self._stock["load_state"](str(stock.path))
        accelerator.project_configuration.iteration = stock.number + 1
        self._places.steps = self._saved_steps = stock.optimizer_steps(accelerator)
        self._last = max(self._last, self.step)
        self.position = Position(step=self.step, epoch=0, batch=0, generation=str(stock.path))
        return self.position

    # ── the end ───────────────────────────────────────────────────────────────────────────────

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every save is committed or failed.

        Raises:
            SaveFailed: one failed and no earlier call has raised it.
        """
        if self._engine is not None:
            self._engine.wait(timeout_s)

    def close(self) -> None:
        """Finish every save, end the writer, and give the Accelerator its own methods back.

        Raises:
            SaveFailed: a save failed and no earlier call has raised it.
        """
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        self._places.on_pause = lambda: None
        for name in (*self._stock, _ATTACHED):
            vars(self._accelerator).pop(name, None)
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CkptError:
            if kind is None:
                raise  # otherwise the caller's own error matters more; this one is in the log

    # ── inside ────────────────────────────────────────────────────────────────────────────────

    def _patch(self) -> None:
        accelerator = self._accelerator
        replaced = {
            "save_state": self._save_state,
            "load_state": self._load_state,
            "skip_first_batches": self._skip_first_batches,
            "prepare_data_loader": self._prepare_data_loader,
            "end_training": self._end_training,
        }
        for name, method in replaced.items():
            self._stock[name] = getattr(accelerator, name)
            setattr(accelerator, name, method)
        setattr(accelerator, _ATTACHED, self)
        self._places.watches()

    def _skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        return self._places.skip(dataloader, num_batches)

    def _prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        loader = self._stock["prepare_data_loader"](*args, **kwargs)
        self._places.watch(loader)
        return loader

    def _end_training(self) -> None:
        end = self._stock["end_training"]
        self.close()  # first: it may need the process group
        end()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        mine = [getattr(one, "optimizer", one) for one in self._accelerator._optimizers]
        if mine and optimizer is mine[0]:
            self._places.steps += 1
            self._places.note_training()

    def _open(self) -> Checkpointer:
        if self._closed:
            raise ConfigError("these checkpoints are closed; call attach(accelerator) again")
        before = _owners.get(self._root)
        if before is not None and (owner := before()) not in (None, self) and not owner._closed:
            logger.warning("another Accelerator of this process goes on in %s", self._root)
            owner.close()
        if self._engine is None:
            self._engine = Checkpointer(
                self._root,
                keep=self.plugin.retention(self._accelerator.project_configuration.total_limit),
                framework={"accelerate": accelerate.__version__},
                **self.plugin.options(),
            )
            _owners[self._root] = weakref.ref(self)
        return self._engine
