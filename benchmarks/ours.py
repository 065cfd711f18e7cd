"""torch-ckpt as two rows, and the extra measurements that its targets are judged by.

Knows the public surface of torch_ckpt. Knows nothing of other peers or of how rows are shown.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from job import Job
from machine import direct_write_s, read_sha256_s, sha256_s
from peers import BareCopy, Peer

REPEATS = 3
TURNS = 4
PAUSE_S = 3.0
POLL_S = 0.002


class OursEager(Peer):
    """`block="staged"`: when save returns, the snapshot is whole and the writer has it."""

    title = "torch-ckpt eager"
    fsyncs = True
    block: ClassVar[Literal["copied", "staged"]] = "staged"

    def __init__(self, job: Job, root: Path) -> None:
        from torch_ckpt import Checkpointer, KeepLast

        super().__init__(job, root)
        self._state = {"model": job.model, "optimizer": job.optimizer}
        began = time.perf_counter()
        self._checkpointer = Checkpointer(root, keep=KeepLast(2), on_error="raise")
        self._checkpointer.prepare({})  # an empty state: what is left is the side process
        self.start_s = time.perf_counter() - began
        began = time.perf_counter()
        self._checkpointer.prepare(self._state, optimizers=[job.optimizer])
        self.prepare_s = time.perf_counter() - began
        self._pending: Any = None

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step:010d}"

    def save(self, step: int) -> None:
        self._pending = self._checkpointer.save(self._state, step, block=self.block)

    def wait(self) -> None:
        # Polled, since PendingSave.wait would complete the copy at once, in place of the fence.
        while self._pending.state in ("copying", "staged"):
            time.sleep(POLL_S)
        self._pending.wait("committed")

    def load(self, step: int) -> None:
        self._checkpointer.load(self._state, step)

    def close(self) -> None:
        self._checkpointer.close()


class OursOverlapped(OursEager):
    """`block="copied"`: the copy runs behind forward and backward, the fence completes it."""

    title = "torch-ckpt overlapped"
    block = "copied"


OURS: dict[str, type[OursEager]] = {"ours-eager": OursEager, "ours-overlapped": OursOverlapped}


def floor_s(job: Job) -> list[float]:
    """Bare copies into warm memory in this very process, each after a real step."""
    copy = BareCopy(job, Path())
    seconds = []
    for step in range(REPEATS):
        job.step()
        began = time.perf_counter()
        copy.save(step)
        seconds.append(time.perf_counter() - began)
    return seconds


def persist_rates(peer: OursEager, job: Job, first_step: int) -> dict[str, list[float]]:
    """Seconds to persist with an idle trainer, and what disk and hashing alone take.

    Disk and persisting take turns at going first: a disk that is rented by the hour gives whoever
    comes after a pause what it has saved up.
    """
    buffer = torch.full((job.bytes,), 1, dtype=torch.uint8).numpy()
    seconds: dict[str, list[float]] = {"persist_s": [], "direct_write_s": [], "sha256_s": []}

    def write_directly() -> None:
        direct = direct_write_s(peer.root / "dd.bin", job.bytes)
        if direct is not None:
            seconds["direct_write_s"].append(direct)

    def persist(step: int) -> None:
        job.step()
        peer.save(step)
        began = time.perf_counter()
        peer.wait()
        seconds["persist_s"].append(time.perf_counter() - began)

    for turn in range(TURNS):
        step = first_step + turn
        time.sleep(PAUSE_S)
        if turn % 2:
            persist(step)
            write_directly()
        else:
            write_directly()
            persist(step)
        seconds["sha256_s"].append(sha256_s(buffer))
    return seconds


def load_rates(peer: OursEager, step: int) -> dict[str, list[float]]:
    """Seconds to load verified, and to mmap and copy the same cached file with safetensors."""
    from safetensors import safe_open

    shards = sorted(peer.folder(step).glob("*.safetensors"))
    seconds: dict[str, list[float]] = {"load_s": [], "safetensors_s": [], "read_sha256_s": []}
    targets: dict[tuple[str, str], torch.Tensor] = {}
    for shard in shards:
        shard.read_bytes()  # into the page cache; written past it
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                targets[shard.name, name] = file.get_tensor(name).clone()
    for _ in range(REPEATS):
        began = time.perf_counter()
        for shard in shards:
            with safe_open(shard, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    targets[shard.name, name].copy_(file.get_tensor(name))
        seconds["safetensors_s"].append(time.perf_counter() - began)
        seconds["read_sha256_s"].append(sum(read_sha256_s(shard) for shard in shards))
        began = time.perf_counter()
        peer.load(step)
        seconds["load_s"].append(time.perf_counter() - began)
    return seconds
