"""The training behind every row of `methods.py`: what a save costs it, and lives that are ended.

Each function runs in a process of its own. Knows the public surface of torch_ckpt and /proc.
Judges nothing.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from codecs_job import BATCH, CONTEXT, GPT, loss_of, sources

from torch_ckpt import Checkpointer, PendingSave

LOSSY_ERROR = 1 / 16
POLL_S = 0.001
JOURNAL = struct.Struct("<q")


class Method(NamedTuple):
    """A way to save: its name in the table and the options that make it."""

    title: str
    options: dict[str, Any]


METHODS = {
    "sync": Method("sync", {"mode": "sync"}),
    "one-slab": Method("async, one slab", {"slabs": 1}),
    "two-slabs": Method("async, two slabs", {}),
    "incremental": Method("incremental", {"incremental": True}),
    "zstd": Method("zstd", {"codec": "zstd"}),
    "fp8": Method("fp8 moments", {"moments": "fp8"}),
    "lossy": Method(
        "lossy: incremental, fp8 moments, weights as lossy deltas",
        {"incremental": True, "moments": "fp8", "lossy_delta": {"model.*": LOSSY_ERROR}},
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How big the model is, and how often it is saved."""

    width: int
    layers: int
    every: int


class Job:
    """A GPT and AdamW."""

    def __init__(self, sizes: Sizes) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = GPT(sizes.width, sizes.layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, checkpointer: Checkpointer) -> float:
        """Forward, backward, update; the seconds that the update waited for a copy."""
        self.optimizer.zero_grad()
        loss_of(self.model, torch.randint(len(sources()) - CONTEXT - 1, (BATCH,))).backward()
        began = time.perf_counter()
        checkpointer.fence()
        waited_s = time.perf_counter() - began
        self.optimizer.step()
        return waited_s


class Durable(threading.Thread):
    """Waits for one save beside the training; polls, since `wait` would complete its copy."""

    def __init__(self, pending: PendingSave, folder: Path, began: float) -> None:
        super().__init__(daemon=True)
        self.pending, self._folder, self._began = pending, folder, began
        self.seconds = 0.0
        self.bytes = 0

    def run(self) -> None:
        while not self.pending.done:
            time.sleep(POLL_S)
        self.seconds = time.perf_counter() - self._began
        self.bytes = sum(file.stat().st_size for file in self._folder.iterdir())


def measure(method: str, root: Path, sizes: Sizes, saves: int, answer: Connection) -> None:
    """Train and save, and send what each save cost; the first, to warm up, does not count."""
    job = Job(sizes)
    checkpointer = Checkpointer(root, on_error="raise", **METHODS[method].options)
    checkpointer.prepare(job.state, optimizers=[job.optimizer])
    pauses: list[float] = []
    saved: list[Durable] = []
    for _ in range(sizes.every):
        job.step(checkpointer)
    checkpointer.save(job.state, 0, block="committed")
    writer = writer_of(os.getpid())
    before = counted(writer)
    for number in range(1, saves + 1):
        job.step(checkpointer)
        began = time.perf_counter()
        pending = checkpointer.save(job.state, number)
        pauses.append(time.perf_counter() - began)
        saved.append(Durable(pending, root / f"step-{number:010d}", began))
        saved[-1].start()
        pauses[-1] += sum(job.step(checkpointer) for _ in range(sizes.every - 1))
    for durable in saved:
        durable.join()
    after = counted(writer)
    checkpointer.close()
    answer.send(
        {
            "raw_bytes": saved[-1].pending.bytes,
            "pause_s": pauses,
            "durable_s": [durable.seconds for durable in saved],
            "stored_bytes": [durable.bytes for durable in saved],
            "writes": (after["syscw"] - before["syscw"]) / saves,
            "written_bytes": (after["wchar"] - before["wchar"]) / saves,
        }
    )


def live(
    method: str, root: Path, sizes: Sizes, journal: Path, answer: Connection, *, last: bool
) -> None:
    """Resume, send the step, and train until somebody ends it; each step goes into the journal."""
    job = Job(sizes)
    checkpointer = Checkpointer(root, on_error="raise", **METHODS[method].options)
    generation = checkpointer.resume(job.state)
    start = 0 if generation is None else generation.step
    answer.send(start)
    if last:
        checkpointer.close()
        return
    with journal.open("wb", buffering=0) as file:
        for step in itertools.count(start + 1):
            job.step(checkpointer)
            file.write(JOURNAL.pack(step))
            if step % sizes.every == 0:
                checkpointer.save(job.state, step)


def trained_until(journal: Path) -> int:
    """The last step in a journal; 0 if there is none yet."""
    if not journal.exists():
        return 0
    steps = journal.read_bytes()
    whole = len(steps) // JOURNAL.size * JOURNAL.size
    return JOURNAL.unpack(steps[:whole][-JOURNAL.size :])[0] if whole else 0


def writer_of(pid: int) -> int:
    """The side process of a trainer.

    Raises:
        LookupError: it has none.
    """
    for name in os.listdir("/proc"):
        if name.isdigit() and _parent(name) == pid:
            return int(name)
    raise LookupError(f"process {pid} has no writer")


def _parent(name: str) -> int:
    try:
        stat = Path(f"/proc/{name}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def counted(pid: int | None) -> dict[str, int]:
    """What the kernel counts of a process: `syscw` system calls that write, `wchar` their bytes."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}
