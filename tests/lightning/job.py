"""A small training job, as functions for this process and as processes of its own to be killed.

A job is described by one dictionary; it prints one JSON line a step, and writes what came out of
a finished run to a file. Run it again after a kill, with the same dictionary.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ckpt import CheckpointCallback, TwoBufferCheckpointIO
from tests.ports import free_port
from tests.tensors import digest_of, tensors_in

SAMPLES, BATCH = 64, 8
STEPS_A_EPOCH = SAMPLES // BATCH

for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*does not have many workers.*")
warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")


def net_for(package: Any) -> type[Any]:
    """The module to train, as a LightningModule of a package."""

    class Net(package.LightningModule):
        def __init__(self, width: int = 8, lr: float = 0.01, extra: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(
                nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1)
            )
            self.lr = lr

        def loss(self, batch: Any) -> torch.Tensor:
            return ((self.net(batch[0]) - batch[1]) ** 2).mean()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), self.lr)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    Net.__qualname__ = "Net"  # so that it can be pickled, for `ddp_spawn`
    return Net


Net = net_for(pl)


def loader(*, shuffle: bool = True) -> DataLoader[Any]:
    """The data, always the same."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH, shuffle=shuffle)


def trainer_for(folder: Path | str, *callbacks: Any, package: Any = pl, **options: Any) -> Any:
    """A quiet trainer on the CPU."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "default_root_dir": str(folder),
    }
    return package.Trainer(callbacks=list(callbacks), **{**settings, **options})


def outcome(trainer: Any) -> dict[str, Any]:
    """What two equal runs have in common at the end."""
    state = {
        "model": trainer.lightning_module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
    }
    return {
        "step": trainer.global_step,
        "digest": digest_of(tensors_in(state)),
        "rng": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    }


# ── the script ────────────────────────────────────────────────────────────────────────────────


class Script(pl.Callback):
    """Says every step, and does what the job is told to do at one of them."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.say(trainer, "start")

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        # Before the batch after that step: callbacks that save have had their turn.
        step, rank = trainer.global_step, trainer.global_rank
        self.say(trainer, "step")
        if step == self.job.get("kill_at"):
            saved = self.job.get("after_step")
            while saved is not None and not committed(self.job["root"], saved):
                time.sleep(0.01)
            trainer.strategy.barrier("all ranks have come this far")
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.job.get("reload_at"):
            path = Path(self.job["folder"]) / "reloaded.ckpt"
            trainer.save_checkpoint(path)
            loaded = trainer.strategy.load_checkpoint(path)
            print(json.dumps({"what": "reloaded", "step": loaded["global_step"], "rank": rank}))
        if step == self.job.get("sigterm_at") and rank in self.job.get("sigterm_ranks", [0, 1]):
            os.kill(os.getpid(), signal.SIGTERM)

    def say(self, trainer: Any, what: str) -> None:
        line = {"what": what, "step": trainer.global_step, "rank": trainer.global_rank}
        print(json.dumps(line), flush=True)


def committed(root: str, step: int) -> bool:
    """Whether a generation of this step is there."""
    return (Path(root) / f"step-{step:010d}" / "manifest.json").exists()


def main(job: dict[str, Any]) -> None:
    """Train as told."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    package = importlib.import_module(job.get("package", "lightning.pytorch"))
    package.seed_everything(0)  # of the command, as the seed of distributed samplers is
    torch.manual_seed(job.get("seed", 0))
    root = job["root"]
    if isinstance(root, list):  # one for each rank, as if it were not shared
        root = root[int(os.environ.get("LOCAL_RANK", "0"))]
    callback = CheckpointCallback(root, **job.get("callback", {}))
    options = {"plugins": [TwoBufferCheckpointIO()]} if job.get("plugin") else {}
    trainer = trainer_for(
        job["folder"], Script(job), callback, package=package, **options, **job.get("trainer", {})
    )
    trainer.fit(net_for(package)(), loader(), loader(shuffle=False), **job.get("fit", {}))
    result = outcome(trainer)
    if trainer.is_global_zero and "out" in job:
        Path(job["out"]).write_text(json.dumps(result))


# ── running it ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Done:
    """What became of one process of a job."""

    code: int
    lines: list[dict[str, Any]]
    log: str

    def steps(self, what: str = "step") -> list[int]:
        """The steps it said."""
        return [line["step"] for line in self.lines if line["what"] == what]


class Running:
    """One process of a job. It is forked from a server that has imported everything."""

    def __init__(self, job: dict[str, Any], **env: str) -> None:
        folder = Path(job["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._log = (folder / f"{uuid.uuid4().hex}.{end}" for end in ("out", "log"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.lightning.job"])
        arguments = (job, str(self._out), str(self._log), env)
        self.process = context.Process(target=_redirected, args=arguments)
        self.process.start()

    def wait(self, timeout_s: float = 90.0) -> Done:
        """How it ended; an end by signal n is code -n."""
        self.process.join(timeout_s)
        log = self._log.read_text()
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still running after {timeout_s:g} s:\n{log[-3000:]}")
        lines = [json.loads(line) for line in self._out.read_text().splitlines()]
        return Done(self.process.exitcode, lines, log)


def run(job: dict[str, Any], **env: str) -> Done:
    """Run a job in one process to its end, whatever that is."""
    return Running(job, **env).wait()


def run_ranks(job: dict[str, Any], world_size: int = 2) -> list[Done]:
    """Run a job as torchrun would: a process a rank."""
    port = free_port()
    ranks = [
        Running(
            job,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GROUP_RANK="0",
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="test",
            GLOO_SOCKET_IFNAME="lo",
        )
        for rank in range(world_size)
    ]
    return [rank.wait() for rank in ranks]


def check_codes(done: list[Done], code: int) -> None:
    """Every rank ended so. If one did not, what all of them said: the others may know why."""
    logs = "\n".join(
        f"── rank {rank}: {one.code}\n{one.log[-4000:]}" for rank, one in enumerate(done)
    )
    assert all(one.code == code for one in done), logs


def _redirected(job: dict[str, Any], out: str, log: str, env: dict[str, str]) -> None:
    for path, descriptor in ((out, 1), (log, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.update(env)
    importlib.import_module(job.get("module", "tests.lightning.job")).main(job)
