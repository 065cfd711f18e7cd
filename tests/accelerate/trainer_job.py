"""A small job for a Hugging Face Trainer, in this process or in processes to be killed.

As a program it takes jobs in JSON, one a line, and runs each in a forked process of its own, so
that several runs cost one import of Transformers.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from accelerate_ckpt import TrainerCheckpoint
from tests.ports import free_port
from tests.running import LIMIT_S
from tests.tensors import digest_of, tensors_in
from torch_ckpt import Checkpointer

SAMPLES, LENGTH, WORDS = 22, 6, 16
SAME = ("model", "optimizer", "scheduler", "random")


class Interrupted(Exception):
    """Stands for a kill, in a process that is to live on."""


class Words(Dataset[Any]):
    """Sentences with a number; some words are drawn when they are read, if wanted."""

    def __init__(self, noise: bool, samples: int = SAMPLES) -> None:
        self.noise = noise
        made = torch.Generator().manual_seed(3)
        self.words = torch.randint(WORDS, (samples, LENGTH), generator=made)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index].clone()
        if self.noise:
            words[0] = int(torch.randint(WORDS, ()))
            words[1], words[2] = random.randrange(WORDS), np.random.randint(WORDS)
        return {"input_ids": words, "labels": words, "index": torch.tensor(index)}


class Watched(Trainer):
    """A Trainer that says what it trains on."""

    seen: list[Any]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        index = inputs.pop("index")
        if model.training:
            self.seen.append([self.state.global_step, index.tolist()])
        return super().compute_loss(model, inputs, *args, **kwargs)


class Ends(TrainerCallback):
    """Ends the run where the job says so."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        job = self.job
        if state.global_step == job.get("jump_from"):
            state.global_step = job["jump_to"]
        if state.global_step == job.get("wait_at"):
            await_commits(job)
        if state.global_step == job.get("interrupt_at"):
            raise Interrupted
        if state.global_step == job.get("kill_at"):
            await_commits(job)
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == job.get("terminate_at") and job.get("rank", 0) == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.job.get("kill_in_save"):  # the copy is under way
            os.kill(os.getpid(), signal.SIGKILL)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.job.get("terminate_within"):
            os.kill(os.getpid(), signal.SIGTERM)


def await_commits(job: dict[str, Any]) -> None:
    deadline = time.monotonic() + 30
    while len(steps(job["root"])) < job.get("after_commits", 0):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def model_of(job: dict[str, Any]) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def trainer_of(job: dict[str, Any], kind: type[Trainer] = Watched) -> Any:
    """The Trainer of a job; `args` are TrainingArguments, `options` those of the callback."""
    torch.manual_seed(job.get("seed", 0))
    callbacks: list[Any] = [Ends(job)]
    if not job.get("stock"):
        callbacks.append(TrainerCheckpoint(job["root"], **job.get("options", {})))
    if job.get("patience"):
        callbacks.append(EarlyStoppingCallback(job["patience"]))
    args = {
        "output_dir": str(Path(job["folder"]) / "trainer"),
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "save_steps": 4,
        "logging_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        **job.get("args", {}),
    }
    trainer = kind(
        model_of(job),
        TrainingArguments(**args),
        train_dataset=Words(job.get("noise", True)),
        eval_dataset=Words(False, 4),
        callbacks=callbacks,
    )
    trainer.seen = []  # type: ignore[attr-defined]
    return trainer


def train(job: dict[str, Any], kind: type[Trainer] = Watched) -> dict[str, Any]:
    """Train as told; what came out."""
    trainer = trainer_of(job, kind)
    random.random()  # what a process draws by itself must not matter
    trainer.train(resume_from_checkpoint=job.get("from"))
    return result_of(trainer)


def result_of(trainer: Any) -> dict[str, Any]:
    """All that has to be the same in two runs."""
    kept = ("runtime", "per_second", "train_loss", "total_flos")
    history = [
        {k: v for k, v in line.items() if not any(word in k for word in kept)}
        for line in trainer.state.log_history
    ]
    return {
        "step": trainer.state.global_step,
        "seen": trainer.seen,
        "history": history,
        "model": digest_of(list(trainer.model.state_dict().values())),
        "optimizer": digest_of(tensors_in(trainer.optimizer.state_dict())),
        "scheduler": repr(trainer.lr_scheduler.state_dict()),
        "random": digest_of([torch.get_rng_state()]) + repr(random.getstate())[-40:],
        "best": trainer.state.best_metric,
    }


def steps(root: Any) -> list[int]:
    """The steps that are committed, oldest first."""
    found = Path(root).glob("step-*/manifest.json")
    return sorted(int(json.loads(path.read_text())["step"]) for path in found)


def usable(root: Any) -> list[int]:
    """Those that a resume would look at, newest first."""
    with Checkpointer(root, distributed=False) as alone:
        return [one.step for one in alone.generations() if not one.tags.keys() & {"aside"}]


# ── processes ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Done:
    """What became of one process; an end by signal n is code -n."""

    code: int
    result: dict[str, Any] | None
    log: str


def run(*jobs: dict[str, Any], timeout_s: float = LIMIT_S) -> list[Done]:
    """Run jobs, one after the other, each in a process of its own, or in `ranks` of them."""
    command = [sys.executable, "-m", "tests.accelerate.trainer_job"]
    done = subprocess.run(
        command,
        input="".join(json.dumps(job) + "\n" for job in jobs),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Done(**json.loads(line)) for line in done.stdout.splitlines()]


def _serve() -> None:
    for number, line in enumerate(sys.stdin.readlines()):
        job = json.loads(line)
        folder = Path(job["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        pids = []
        env = _env(job.get("ranks", 1))
        for rank in range(job.get("ranks", 1)):
            pid = os.fork()
            if pid == 0:
                os.environ.update(
                    {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} if env else {}
                )
                name = folder / f"{number}-{rank}"
                _child({**job, "rank": rank}, name.with_suffix(".out"), name.with_suffix(".log"))
            pids.append(pid)
        for rank, pid in enumerate(pids):
            _, status = os.waitpid(pid, 0)
            out, log = (folder / f"{number}-{rank}.{end}" for end in ("out", "log"))
            result = json.loads(out.read_text()) if out.exists() else None
            code = os.waitstatus_to_exitcode(status)
            print(json.dumps({"code": code, "result": result, "log": log.read_text()}), flush=True)


def _env(ranks: int) -> dict[str, str]:
    """What torchrun would set, but for the rank."""
    if ranks == 1:
        return {}
    port = free_port()
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _child(job: dict[str, Any], out: Path, log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.dump_traceback_later(LIMIT_S - 10, exit=True)  # nobody else would end it
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    code = 1
    try:
        result = train(job)
        out.write_text(json.dumps(result))
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
