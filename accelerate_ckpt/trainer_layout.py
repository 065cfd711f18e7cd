"""The files that a Trainer writes into a checkpoint folder, all but the large ones.

The Trainer's own `_save_checkpoint` runs, with whatever a subclass has made of it, into a folder
that is thrown away afterwards. Weights, optimizer, scheduler and random states are left out of it,
because the engine copies them from where they are; what else it writes is kept, byte for byte.

Knows a Trainer and file names. Knows nothing of the engine.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, Trainer
from transformers.core_model_loading import revert_weight_conversion

from accelerate_ckpt.trainer_state import Layout, is_adapted
from accelerate_ckpt.wrappers import unwrapped

_WEIGHTS = "model.safetensors"
_STATE = "trainer_state.json"
_OWN = ("optimizer.pt", "scheduler.pt", "scaler.pt")
_PARTS = ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What the Trainer wrote."""

    trainer_state: str
    """Its own state, as JSON; empty on a rank that writes none."""

    weights: str | None
    """Where the model's tensors belong in the folder; None if they are among the files."""


class Staging:
    """Has the checkpoints of one Trainer written without what is large."""

    def __init__(self, trainer: Any, save: Callable[[Any, Any], None]) -> None:
        """Args:
        save: the Trainer's own `_save_checkpoint`.
        """
        self._trainer, self._save_checkpoint = trainer, save
        self._model = unwrapped(trainer.model)
        self._weights: Path | None = None
        parts = [
            name for name in _PARTS if getattr(type(trainer), name) is getattr(Trainer, name)
        ]  # what a subclass has made its own runs: it may write more than the engine takes over
        self._on_trainer: dict[str, Any] = dict.fromkeys(parts, _nothing)
        self._on_model: dict[str, Any] = {}
        if _plain(self._model):
            stock = self._model.save_pretrained
            self._on_model["save_pretrained"] = partial(self._save_pretrained, stock)
        elif type(trainer)._save is Trainer._save and _is_foreign(self._model):
            self._on_trainer["_save"] = partial(self._save, trainer._save)

    def take(self, model: Any, files: Layout) -> Staged:
        """Let the Trainer write a checkpoint, and collect the files that are left to keep."""
        self._weights = None
        with _scratch() as folder:
            on_trainer = {**self._on_trainer, "_get_output_dir": lambda trial=None: str(folder)}
            with _instead(self._trainer, on_trainer), _instead(self._model, self._on_model):
                self._save_checkpoint(model, None)
            here = folder / f"checkpoint-{self._trainer.state.global_step}"
            state = here / _STATE
            text = state.read_text(encoding="utf-8") if state.is_file() else ""
            for path in [state, *(here / name for name in _OWN), *here.glob("rng_state*.pth")]:
                path.unlink(missing_ok=True)
            weights = None
            if self._weights is not None:
                weights = self._weights.resolve().relative_to(here.resolve()).as_posix()
            files.collect(here)
        return Staged(trainer_state=text, weights=weights)

    def _save_pretrained(
        self, stock: Callable[..., Any], save_directory: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """In place of `PreTrainedModel.save_pretrained`."""
        wanted = kwargs.get("state_dict")
        if args or kwargs.keys() - {"is_main_process", "state_dict"} or wanted is not None:
            return stock(save_directory, *args, **kwargs)
        result = stock(save_directory, **{**kwargs, "state_dict": {}})
        self._note(save_directory)
        return result

    def _save(
        self, stock: Callable[..., Any], output_dir: Any = None, state_dict: Any = None
    ) -> Any:
        """In place of `Trainer._save`, for a model that is no `PreTrainedModel`."""
        if state_dict is not None or not self._trainer.args.should_save:
            return stock(output_dir, state_dict)
        result = stock(output_dir, {})
        self._note(output_dir)
        return result

    def _note(self, folder: Any) -> None:
        self._weights = Path(folder) / _WEIGHTS
        self._weights.unlink(missing_ok=True)  # of no tensors


def _plain(model: Any) -> bool:
    """Whether the file of a model holds its tensors, whole and under their own names."""
    if not isinstance(model, PreTrainedModel) or getattr(model, "hf_quantizer", None) is not None:
        return False
    if is_adapted(model):
        return False
    if model._keys_to_ignore_on_save or getattr(model, "hf_device_map", None) is not None:
        return False
    names = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    reverted = revert_weight_conversion(model, dict(names))
    return reverted.keys() == names.keys() and all(
        reverted[name] is tensor for name, tensor in names.items()
    )


def _is_foreign(model: Any) -> bool:
    """Whether the Trainer itself writes the model's tensors, since the model cannot."""
    return not isinstance(model, PreTrainedModel) and not is_adapted(model)


@contextmanager
def _instead(owner: Any, replaced: dict[str, Any]) -> Iterator[None]:
    """Attributes of one instance, for as long as it takes."""
    before = {name: vars(owner)[name] for name in replaced if name in vars(owner)}
    try:
        for name, value in replaced.items():
            object.__setattr__(owner, name, value)
        yield
    finally:
        for name in replaced:
            vars(owner).pop(name, None)
        vars(owner).update(before)


def _nothing(output_dir: Any) -> None:
    """Leave something out."""


@contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="trainer-ckpt-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
