"""What this machine is and can do: one line about it, disk and hash speed, memory of a job.

Knows /proc, dd and hashlib. Knows nothing of checkpoints.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

BLOCK_BYTES = 8 << 20
DD_BLOCK_BYTES = 16 << 20
SAMPLE_S = 0.05
SCAN_EVERY = 10
MARKER = "TORCH_CKPT_BENCHMARK_ROW"


def machine_facts(folder: Path) -> dict[str, Any]:
    """Processor, cores, memory, the file system under `folder`, versions, date."""
    import torch

    cpu = next(iter(_fields("/proc/cpuinfo", "model name")), platform.processor())
    memory = next(iter(_fields("/proc/meminfo", "MemTotal")), "0 kB")
    device, kind = _mount(folder)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(int(memory.split()[0]) / 2**20, 1),
        "device": device,
        "file_system": kind,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
    }


def machine_line(facts: dict[str, Any]) -> str:
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['ram_gib']} GiB, "
        f"{facts['file_system']} on {facts['device']}, torch {facts['torch']}, "
        f"Python {facts['python']}, load {facts['load_average']}, {facts['date']}"
    )


def _fields(path: str, name: str) -> Iterator[str]:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            yield value.strip()


def _mount(folder: Path) -> tuple[str, str]:
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [entry for entry in mounts if folder.resolve().is_relative_to(entry[1])]
    device, _, kind = max(inside, key=lambda entry: len(entry[1]))
    return device, kind


def direct_write_s(path: Path, size: int) -> float | None:
    """Seconds `dd oflag=direct bs=16M` takes for `size` bytes; None where it cannot.

    They are random as weights are: some disks take zeros several times as fast.
    """
    blocks = max(1, round(size / DD_BLOCK_BYTES))
    with _random_file(blocks * DD_BLOCK_BYTES) as source:
        inside = f"/dev/fd/{source.fileno()}"
        command = ["dd", f"if={inside}", f"of={path}", "bs=16M", f"count={blocks}", "oflag=direct"]
        began = time.perf_counter()
        try:
            done = subprocess.run(
                command, capture_output=True, check=False, pass_fds=[source.fileno()]
            )
        except FileNotFoundError:
            return None
        seconds = time.perf_counter() - began
    path.unlink(missing_ok=True)
    return seconds * size / (blocks * DD_BLOCK_BYTES) if done.returncode == 0 else None


def _random_file(size: int) -> BinaryIO:
    """A file in memory."""
    generator = random.Random(size)
    file = os.fdopen(os.memfd_create("random"), "w+b")
    for at in range(0, size, DD_BLOCK_BYTES):
        file.write(generator.randbytes(min(DD_BLOCK_BYTES, size - at)))
    file.seek(0)
    file.flush()
    return file


def sha256_s(buffer: Any) -> float:
    """Seconds all cores together need to hash `buffer` in blocks."""
    view = memoryview(buffer).cast("B")
    blocks = [view[at : at + BLOCK_BYTES] for at in range(0, len(view), BLOCK_BYTES)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        began = time.perf_counter()
        for _ in pool.map(lambda block: hashlib.sha256(block).digest(), blocks):
            pass
        return time.perf_counter() - began


class MemoryWatch:
    """Peak memory of every process that carries a mark in its environment, phase by phase.

    Private pages of all processes are added up; shared ones count once, by the process that maps
    the most of them. A mark finds side processes however they were started.
    """

    def __init__(self, mark: str) -> None:
        self._mark = f"{MARKER}={mark}".encode()
        self._phase = ""
        self._known: dict[int, bool] = {}
        self._peaks: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def enter(self, phase: str) -> None:
        self._phase = phase

    def peak_bytes(self, phase: str) -> int:
        return self._peaks.get(phase, 0)

    def _run(self) -> None:
        sample = 0
        while not self._over.wait(SAMPLE_S):
            if sample % SCAN_EVERY == 0:
                self._scan()
            sample += 1
            phase = self._phase
            memories = [_memory(pid) for pid, ours in self._known.items() if ours]
            total = sum(private for private, _ in memories)
            total += max((shared for _, shared in memories), default=0)
            self._peaks[phase] = max(self._peaks.get(phase, 0), total)

    def _scan(self) -> None:
        running = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        # A process found without the mark may be about to exec: it is asked again.
        self._known = {pid: True for pid, ours in self._known.items() if ours and pid in running}
        for pid in running - self._known.keys():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            self._known[pid] = self._mark in environment.split(b"\0")


def _memory(pid: int) -> tuple[int, int]:
    """Private and shared resident bytes; zeros once the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    values = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return int(values.get("RssAnon", 0)) * 1024, int(values.get("RssShmem", 0)) * 1024


def read_sha256_s(path: Path) -> float:
    """Seconds all cores together need to read a cached file into buffers and hash those."""
    size = path.stat().st_size
    buffers = threading.local()

    def one(at: int) -> None:
        if not hasattr(buffers, "view"):
            buffers.view = memoryview(bytearray(BLOCK_BYTES))
        hashlib.sha256(buffers.view[: os.preadv(file, [buffers.view], at)]).digest()

    file = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            began = time.perf_counter()
            for _ in pool.map(one, range(0, size, BLOCK_BYTES)):
                pass
            return time.perf_counter() - began
    finally:
        os.close(file)
