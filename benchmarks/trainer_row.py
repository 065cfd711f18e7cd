"""The Hugging Face Trainer as rows: one script, `trainer.train()`, with and without the callback.

Its loop is its own, so it is watched from callbacks: how long `_save_checkpoint` takes, how long
the next update waits for the copy, how long steps take. Knows the Trainer. Knows nothing of what
the numbers are held to.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from job import JobSize, StepTime, Transformer
from peers import POLL_S, fsync_tree
from saved import Saved, summary
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

BASELINE_STEPS = 4
CLEAN_STEPS = 3
MAX_STEPS = 100_000
TIMEOUT_S = 300.0


class TrainerRow:
    """One way to save for a Trainer."""

    title: ClassVar[str] = "HF Trainer"
    persists: ClassVar[bool] = True
    fsyncs: ClassVar[bool] = False
    overlap: ClassVar[bool | None] = None
    """Of the callback; None trains without it."""

    def __init__(self, size: JobSize, root: Path, saves: int, warm_up_s: float) -> None:
        self.size, self.root, self.saves, self.warm_up_s = size, root, saves, warm_up_s

    def measure(self, phase: Callable[[str], None]) -> dict[str, Any]:
        """Train and save; the row's numbers."""
        from transformers import Trainer, TrainingArguments

        torch.manual_seed(0)
        watch = _watch_of(self)
        callbacks: list[Any] = []
        if self.overlap is not None:
            from accelerate_ckpt import TrainerCheckpoint

            callbacks.append(
                TrainerCheckpoint(
                    self.root / "run", keep="last=2", overlap=self.overlap, on_error="raise"
                )
            )
        arguments = {
            "output_dir": str(self.root / "trainer"),
            "save_strategy": "no",  # the watch asks
            "save_total_limit": 2,
            "per_device_train_batch_size": self.size.batch,
            "learning_rate": 1e-4,
            "logging_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "dataloader_pin_memory": False,
        }
        model, tokens = WithLoss(self.size), Tokens(self.size)
        phase("baseline")
        alone = TrainingArguments(**arguments, max_steps=BASELINE_STEPS)
        Trainer(model, alone, train_dataset=tokens).train()
        gc.collect()
        phase("saves")
        endless = TrainingArguments(**arguments, max_steps=MAX_STEPS)
        trainer = Trainer(model, endless, train_dataset=tokens, callbacks=[*callbacks, watch])
        watch.listen(trainer)
        trainer.train()
        moments = 2 * sum(parameter.nbytes for parameter in model.parameters())  # AdamW's
        return summary(
            title=self.title,
            state_bytes=sum(one.nbytes for one in model.state_dict().values()) + moments,
            persists=True,
            clean=watch.clean,
            taken=watch.taken,
        ) | {"verified": None}

    def complete(self, step: int) -> bool:
        """Whether a save is durable."""
        folder = self.root / "trainer" / f"checkpoint-{step}"
        fsync_tree(folder)
        return True


class TrainerEager(TrainerRow):
    title = "HF Trainer with TrainerCheckpoint, eager"
    fsyncs = True
    overlap = False

    def complete(self, step: int) -> bool:
        return (self.root / "run" / f"step-{step:010d}" / "manifest.json").exists()


class TrainerOverlapped(TrainerEager):
    title = "HF Trainer with TrainerCheckpoint, overlapped"
    overlap = True


TRAINERS: dict[str, type[TrainerRow]] = {
    "trainer": TrainerRow,
    "trainer-eager": TrainerEager,
    "trainer-overlapped": TrainerOverlapped,
}


class WithLoss(nn.Module):
    """The job's model, as a Trainer wants it."""

    def __init__(self, size: JobSize) -> None:
        super().__init__()
        self.inner = Transformer(size)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(tokens).square().mean()}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Drawn once."""

    def __init__(self, size: JobSize) -> None:
        self._lines = torch.randint(size.vocabulary, (256, size.context))

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self._lines[index]}


class Completion(threading.Thread):
    """Waits beside the training for one save to be durable, and notes when."""

    def __init__(self, row: TrainerRow, step: int) -> None:
        super().__init__(daemon=True)
        self._row, self._step = row, step
        self.ended = 0.0

    def run(self) -> None:
        deadline = time.perf_counter() + TIMEOUT_S
        while not self._row.complete(self._step) and time.perf_counter() < deadline:
            time.sleep(POLL_S)
        self.ended = time.perf_counter()


def _watch_of(row: TrainerRow) -> Any:
    """The callback that measures; made here, since its base takes seconds to import."""
    from transformers import TrainerCallback

    class Watch(_Watch, TrainerCallback):
        pass

    return Watch(row)


class _Watch:
    """Asks for saves, one after the other, and takes the time."""

    def __init__(self, row: TrainerRow) -> None:
        self._row = row
        self.clean: list[StepTime] = []
        self.taken: list[Saved] = []
        self._began = self._hooks_began = self._waited_s = 0.0
        self._ready = 0.0
        self._saving: Completion | None = None
        self._asked = 0.0
        self._quiet = 0
        # Global hooks run in the order of their registration, then the optimizer's own: what
        # passes between these two is the engine's global hook, registered after the first.
        register_optimizer_step_pre_hook(self._enter_hooks)

    def listen(self, trainer: Any) -> None:
        """Take the time of what is the Trainer's, or the callback's, way of saving."""
        stock = trainer._save_checkpoint

        def timed(*arguments: Any, **named: Any) -> None:
            self._asked = time.perf_counter()
            stock(*arguments, **named)
            self.taken.append(Saved(blocked_s=time.perf_counter() - self._asked))
            self._saving = Completion(self._row, trainer.state.global_step)
            self._saving.start()

        trainer._save_checkpoint = timed

    def _enter_hooks(self, optimizer: Any, *_: Any) -> None:
        self._hooks_began = time.perf_counter()

    def _leave_hooks(self, optimizer: Any, *_: Any) -> None:
        self._waited_s += time.perf_counter() - self._hooks_began

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(self._leave_hooks)
        self._ready = time.perf_counter() + self._row.warm_up_s

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began, self._waited_s = time.perf_counter(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        taken = StepTime(began=self._began, seconds=now - self._began, waited_s=self._waited_s)
        if self._saving is not None:
            self.taken[-1].busy_steps.append(taken)
            self.taken[-1].blocked_s += taken.waited_s
            if not self._saving.is_alive():
                self.taken[-1].ended = self._saving.ended
                self.taken[-1].durable_s = self._saving.ended - self._asked
                self._saving, self._quiet = None, 0
            return
        if now < self._ready:
            return
        self._quiet += 1
        self.clean.append(taken)
        if self._quiet < CLEAN_STEPS:
            return
        if len(self.taken) == self._row.saves:
            control.should_training_stop = True
        else:
            control.should_save = True
