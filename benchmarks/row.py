"""One row of the benchmark, run in a process of its own: train, save, keep training, load, damage.

Prints JSON lines: phases as they begin, then the result. Knows one peer at a time; judges nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from job import FULL, QUICK, Job
from ours import OURS, TURNS, OursEager, floor_s, load_rates, persist_rates
from peers import PEERS, BareCopy, Peer, fsync_tree
from saved import Saved, summary
from trainer_row import TRAINERS, TrainerRow

ROWS: dict[str, type[Peer] | type[TrainerRow]] = {"floor": BareCopy, **OURS, **PEERS, **TRAINERS}
BASELINE_STEPS = 4
MAX_STEPS_PER_SAVE = 1000
WARM_UP_S = 6.0
QUICK_WARM_UP_S = 1.0


class Completion(threading.Thread):
    """Waits beside the training for one save to be durable, and notes when."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        super().__init__(daemon=True)
        self._peer, self._folder = peer, folder
        self.ended = 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._peer.wait()
            if self._peer.persists and not self._peer.fsyncs:
                fsync_tree(self._folder)
        except BaseException as error:  # raised again in the main thread
            self.error = error
        self.ended = time.perf_counter()


def save_once(peer: Peer, job: Job, step: int) -> Saved:
    """Save, then train on until the save is durable."""
    began = time.perf_counter()
    peer.save(step)
    saved = Saved(blocked_s=time.perf_counter() - began)
    completion = Completion(peer, peer.folder(step))
    completion.start()
    completion.join(0.001)  # a peer that returned durable has no step beside it
    while completion.is_alive():
        saved.busy_steps.append(job.step(peer.fence))
        if len(saved.busy_steps) > MAX_STEPS_PER_SAVE:
            raise TimeoutError(f"not durable after {MAX_STEPS_PER_SAVE} steps")
    if completion.error is not None:
        raise completion.error
    saved.ended = completion.ended
    saved.durable_s = completion.ended - began
    saved.blocked_s += sum(taken.waited_s for taken in saved.busy_steps)
    return saved


def detects_damage(peer: Peer, step: int) -> str:
    """Load as it is, flip one byte in the middle of the largest file, load again."""
    peer.load(step)
    files = [path for path in peer.folder(step).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    try:
        peer.load(step)
    except Exception as error:
        return f"yes ({type(error).__name__})"
    return "no"


def measure(name: str, root: Path, *, quick: bool, saves: int, report: Report) -> dict[str, Any]:
    """Run the row `name` and return its numbers."""
    kind = ROWS[name]
    if issubclass(kind, TrainerRow):
        warm_up_s = QUICK_WARM_UP_S if quick else WARM_UP_S
        return kind(QUICK if quick else FULL, root, saves, warm_up_s).measure(report.phase)
    job = Job(QUICK if quick else FULL)
    extra: dict[str, Any] = {}
    if name in OURS:
        extra["floor_s"] = floor_s(job)
    report.phase("baseline")
    clean = [job.step() for _ in range(BASELINE_STEPS)][1:]
    report.phase("saves")
    peer = kind(job, root)
    if isinstance(peer, OursEager):
        extra["start_s"], extra["prepare_s"] = peer.start_s, peer.prepare_s
        extra["starting_step_s"] = job.step(peer.fence).seconds
    ready = time.perf_counter() + (QUICK_WARM_UP_S if quick else WARM_UP_S)
    while time.perf_counter() < ready:  # a real first save comes minutes after the start
        job.step(peer.fence)
    taken: list[Saved] = []
    for step in range(1, saves + 1):
        clean.append(job.step(peer.fence))
        taken.append(save_once(peer, job, step))
        if name not in OURS and step > 1:
            shutil.rmtree(peer.folder(step - 1), ignore_errors=True)
    newest = saves
    if name == "ours-eager" and isinstance(peer, OursEager):
        report.phase("rates")
        newest += TURNS
        extra |= persist_rates(peer, job, saves + 1)
        extra |= load_rates(peer, newest)
    report.phase("damage")
    verified = detects_damage(peer, newest) if peer.persists else None
    report.phase("close")
    peer.close()
    numbers = summary(
        title=peer.title,
        state_bytes=job.bytes,
        persists=peer.persists,
        clean=clean,
        taken=taken,
    )
    return numbers | {"verified": verified} | extra


class Report:
    """JSON lines to the process that started this one; all other output goes to stderr."""

    def __init__(self) -> None:
        self._file: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def phase(self, name: str) -> None:
        self.write({"phase": name})

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="One row of stall.py, in its own process.")
    parser.add_argument("name", choices=ROWS)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    report = Report()
    try:
        result = measure(
            options.name, options.dir, quick=options.quick, saves=options.saves, report=report
        )
    except ImportError as error:
        report.write({"unavailable": f"{type(error).__name__}: {error}"})
        return 0
    report.write(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
