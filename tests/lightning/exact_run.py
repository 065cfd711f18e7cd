"""Running a case whole, interrupted and resumed, on stock Lightning plus `ExactResume`."""

from __future__ import annotations

import hashlib
import importlib
import io
import random
import signal
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch

from lightning_ckpt.exact import ExactResume
from tests.lightning.exact_job import Case, Fetching, Model
from torch_ckpt import RngState

_Callback: Any = pl.Callback if TYPE_CHECKING else object


def of(package: Any, base: str, part: type) -> Any:
    """A class of ours on a base of one of the twin packages."""
    return type(part.__name__, (part, getattr(package, base)), {})


class Preempted(Exception):
    pass


class Events:
    """What happened, as a list of comparable lines; ends the run where it is told to."""

    def __init__(self, fail_at_batch: int | None = None) -> None:
        self.lines: list[str] = []
        self.batches = 0
        self.fail_at_batch = fail_at_batch

    def add(self, *parts: Any) -> None:
        shown = [p.tolist() if isinstance(p, torch.Tensor) else p for p in parts]
        self.lines.append(repr(shown))

    def tick(self, trainer: Any) -> None:
        self.batches += 1
        if self.batches == self.fail_at_batch:
            raise Preempted


class Recorder(_Callback):
    def __init__(self, events: Events) -> None:
        self.events = events

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        parts = batch if pl_module.case.several else [batch]
        seen = [part[1].tolist() for part in parts if part is not None]
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.events.add("train", trainer.current_epoch, batch_idx, seen, rate, outputs["loss"])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = {name: value.item() for name, value in sorted(trainer.callback_metrics.items())}
        self.events.add("epoch", trainer.current_epoch, trainer.global_step, metrics)


class Exact(_Callback):
    """The smallest callback that drives ExactResume; saves with Lightning's own save_checkpoint."""

    def __init__(self, path: Path, save: tuple[str, int] | None, exact: ExactResume) -> None:
        self.path, self.save, self.exact, self.calls = path, save, exact, 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.exact.setup(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.exact.teardown(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.exact.restore(trainer)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.exact.on_train_batch_start(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.exact.on_train_batch_end(trainer)
        self._reached("batch_end", trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.exact.on_validation_start(trainer)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self._reached("validation_batch_end", trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.exact.on_validation_end(trainer)
        self._reached("validation_end", trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._reached("epoch_start", trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._reached("epoch_end", trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.save is not None and self.save[0] in ("exception", "sigterm"):
            trainer.save_checkpoint(self.path)

    def _reached(self, hook: str, trainer: Any) -> None:
        if self.save is None or trainer.sanity_checking:
            return
        name, count = self.save
        if hook == name or (name == "sigterm" and hook == "batch_end"):
            self.calls += 1
            if self.calls == count:
                if name == "sigterm":
                    signal.raise_signal(signal.SIGTERM)
                else:
                    trainer.save_checkpoint(self.path)
                    raise Preempted

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict) -> None:
        state = self.exact.state_dict(trainer)
        assert_plain(state)
        states = [state]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, state)
        data = io.BytesIO()
        torch.save(states, data)
        checkpoint["exact"] = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict) -> None:
        data = io.BytesIO(checkpoint["exact"].numpy().tobytes())
        states = torch.load(data, weights_only=False)
        self.exact.load_state_dict(states[trainer.global_rank % len(states)])


class LateExact(Exact):
    """Gives the state only after the loaders were made, as sharded strategies do."""

    late: Any = None

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict) -> None:
        self.late = checkpoint

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.late is not None:
            Exact.on_load_checkpoint(self, trainer, pl_module, self.late)
        super().on_train_start(trainer, pl_module)


class LateSetup(Exact):
    """Begins to watch only once the optimizers were configured."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pass

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.exact.setup(trainer)


class Resized(Exact):
    """Loads the state of a run that had two ranks."""

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self.exact._pending["world_size"] = 2


def assert_plain(value: Any) -> None:
    """Only what typed JSON and tensor files can hold."""
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        for item in value.values():
            assert_plain(item)
    elif isinstance(value, list):
        for item in value:
            assert_plain(item)
    else:
        kinds = (bool, int, float, str, torch.Tensor, np.ndarray, type(None))
        assert isinstance(value, kinds), type(value)


# ── running ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Result:
    lines: tuple[str, ...]
    weights: str
    optimizer: str
    generators: str


def digest(value: Any) -> str:
    def plain(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            item = item.detach().numpy()
        if isinstance(item, np.ndarray):
            return (str(item.dtype), item.shape, item.tobytes())
        if isinstance(item, dict):
            return [(key, plain(part)) for key, part in item.items()]
        if isinstance(item, list | tuple):
            return [plain(part) for part in item]
        return repr(item)

    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()[:16]


def train(
    case: Case,
    folder: Path,
    *,
    seed: int = 5,
    callback: Exact | None = None,
    resume: Path | None = None,
    fail_at_batch: int | None = None,
    **options: Any,
) -> Result:
    """Train once; an interruption ends it early, quietly."""
    package = importlib.import_module(case.package)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads on tiny tensors cost more than they save
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    model, events = (
        of(package, "LightningModule", Fetching if case.step_fetches else Model)(case),
        Events(fail_at_batch),
    )
    callbacks: list[Any] = [of(package, "Callback", Recorder)(events)]
    if case.stop_early:
        early = importlib.import_module(f"{case.package}.callbacks").EarlyStopping
        callbacks.append(early("val_loss", patience=1, min_delta=100.0))
    if callback is not None:
        callback.__class__ = of(package, "Callback", type(callback))
        callbacks.append(callback)
    defaults: dict[str, Any] = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    trainer = package.Trainer(callbacks=callbacks, **{**defaults, **dict(case.trainer), **options})
    trainer.events = events
    try:
        if case.loaders_in_module:
            model.train_dataloader = case.train_loader
            if case.validate:
                model.val_dataloader = case.validation_loader
            trainer.fit(model, ckpt_path=resume)
        else:
            trainer.fit(model, case.train_loader(), case.validation_loader(), ckpt_path=resume)
    except (Preempted, SystemExit):
        pass
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    return Result(
        lines=tuple(events.lines),
        weights=digest([model.state_dict(), model.scale]),
        optimizer=digest(trainer.optimizers[0].state_dict()),
        generators=digest(RngState().state_dict()),
    )


@lru_cache
def uninterrupted(case: Case) -> Result:
    return train(case, Path("/nonexistent"))


def check(
    case: Case,
    save: tuple[str, int],
    folder: Path,
    *,
    exact: type[Exact] = Exact,
    skip: Any = "exact",
) -> None:
    """Interrupt at `save`, resume, and compare with the stock run."""
    path = folder / "saved.ckpt"
    fail_at = save[1] if save[0] == "exception" else None
    before = train(case, folder, callback=Exact(path, save, ExactResume()), fail_at_batch=fail_at)
    after = train(
        case, folder, seed=77, callback=exact(path, None, ExactResume(skip=skip)), resume=path
    )
    whole = uninterrupted(case)
    lines = list(before.lines)
    while (
        lines and lines[-1].startswith("['val'") and save[0] in ("validation_batch_end", "sigterm")
    ):
        lines.pop()  # a validation that was cut short is repeated
    assert (*lines, *after.lines) == whole.lines
    assert after.weights == whole.weights
    assert after.optimizer == whole.optimizer
    assert after.generators == whole.generators
