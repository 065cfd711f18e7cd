"""Ways to save one training run side by side: what a save costs, and what a SIGKILL costs.

Every row trains a small GPT on the sources of Python's standard library. Starts each measurement
in a process of its own and shows what came back; holds no numbers of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from codecs_job import sources
from machine import machine_facts, machine_line
from methods_job import METHODS, Job, Sizes, live, measure, trained_until, writer_of
from table import show, show_verdicts, write
from targets import Verdict

SAVED = Sizes(width=256, layers=5, every=4)
KILLED = Sizes(width=64, layers=2, every=10)
QUICK = Sizes(width=64, layers=1, every=4)
CHAINS = 2
LIFE_S = (0.1, 0.9)
ANSWER_S = 120.0
LOST_INTERVALS = {"lost": ("trainer", 2), "lost_both": ("trainer and writer", 3)}
"""A trainer that dies loses the snapshot it is copying at most; with it goes what two slabs hold,
if the writer dies too. What was trained since comes on top."""
COLUMNS = [
    "method",
    "pause ms",
    "durable ms",
    "stored MB/save",
    "writes/save",
    "written MB/save",
    "steps lost, trainer killed",
    "steps lost, writer too",
]
NOTES = """\
pause: inside save() and before the next updates, until the copy is complete; median
durable: from the call of save() until the manifest is published and synced; median
stored, writes, written: mean over whole chains of 9 generations: files of a generation; system
calls of the writer that write, and their bytes (parts, manifest, index and messages included)
steps lost: trained when SIGKILL came, less the step resumed from: mean (most), number of kills;
the kills come at the same random moments for every method"""

Row = dict[str, Any]
_FORK = get_context("fork")  # what is imported once need not be imported for every life


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    torch.set_num_threads(1)  # and so no thread of torch's is there to be forked
    Job(QUICK)  # with what torch imports at its first optimizer, once for all lives
    sources()
    base: Path = options.dir or Path.cwd()
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="methods-", dir=base))
    kills = options.kills or (3 if options.quick else 20)
    rows: dict[str, Row] = {}
    try:
        facts = machine_facts(folder)
        print(machine_line(facts), flush=True)
        if facts["load_average"] > facts["cores"] / 2:
            print(f"NOT QUIET: a load of {facts['load_average']} beside it distorts every time")
        for name in options.methods:
            print(f"  running {name} …", end="", file=sys.stderr, flush=True)
            began = time.perf_counter()
            rows[name] = run(name, folder, kills=kills, seed=options.seed, quick=options.quick)
            print(f" {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size = next(iter(rows.values()))["raw_bytes"] / 1e6
    every = QUICK if options.quick else SAVED
    print(
        f"state {size:.1f} MB, saved every {every.every} steps; kills: every {KILLED.every} steps"
    )
    show(COLUMNS, [_cells(row) for row in rows.values()])
    print(NOTES)
    verdicts = judge(rows)
    show_verdicts(verdicts)
    if options.json:
        write(options.json, facts, rows, verdicts, quick=options.quick)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dir", type=Path, help="where to write; a temporary folder inside it")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    parser.add_argument("--quick", action="store_true", help="a small state: a smoke test only")
    parser.add_argument("--kills", type=int, help="of the trainer, and again of both processes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which they come")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="only these"
    )
    return parser


def run(name: str, base: Path, *, kills: int, seed: int, quick: bool) -> Row:
    """One method: what its saves cost, then what is lost when it is killed."""
    saves = 9 * (1 if quick else CHAINS)
    process, answers = _start(
        measure, name, base / f"{name}-saved", QUICK if quick else SAVED, saves
    )
    row: Row = {"title": METHODS[name].title, **_answer(process, answers)}
    process.join()
    row["lost"] = lost_steps(name, base / f"{name}-killed", kills=kills, seed=seed, both=False)
    row["lost_both"] = lost_steps(name, base / f"{name}-both", kills=kills, seed=seed, both=True)
    for folder in base.glob(f"{name}-*"):
        shutil.rmtree(folder)
    return row


def lost_steps(name: str, root: Path, *, kills: int, seed: int, both: bool) -> list[int]:
    """End one life after the other; how many steps each next one has to train again."""
    moments = random.Random(seed)
    root.mkdir()
    lost: list[int] = []
    trained = 0
    for number in range(kills + 1):
        journal = root.parent / f"{root.name}-{number}.journal"
        process, answers = _start(live, name, root, KILLED, journal, _last=number == kills)
        start = _answer(process, answers)
        if number:
            lost.append(trained - start)
        if number == kills:
            process.join()
            break
        while not trained_until(journal) and process.is_alive():
            time.sleep(0.002)
        time.sleep(moments.uniform(*LIFE_S))
        if not process.is_alive():
            raise RuntimeError(f"{name}: the training ended by itself, see above")
        writer = writer_of(process.pid or 0) if both else None
        process.kill()
        if writer is not None:
            os.kill(writer, signal.SIGKILL)
        process.join()
        trained = trained_until(journal)
        journal.unlink()
    return lost


def _start(
    target: Callable[..., None], *arguments: Any, _last: bool | None = None
) -> tuple[BaseProcess, Connection]:
    answers, sends = _FORK.Pipe(duplex=False)
    more = {} if _last is None else {"last": _last}
    process = _FORK.Process(target=target, args=(*arguments, sends), kwargs=more, daemon=True)
    process.start()
    sends.close()
    return process, answers


def _answer(process: BaseProcess, answers: Connection) -> Any:
    """What it sends.

    Raises:
        RuntimeError: it ended, or was silent for long.
    """
    try:
        if answers.poll(ANSWER_S):
            return answers.recv()
    except EOFError:
        pass
    process.kill()
    process.join()
    raise RuntimeError("a measurement did not answer, see above")


def judge(rows: dict[str, Row]) -> list[Verdict]:
    """No kill costs more than what cannot have been durable."""
    return [
        Verdict(
            target=f"{row['title']}: {what} killed, < {intervals} intervals lost",
            measured=f"{max(row[field])} steps",
            verdict="reached" if max(row[field]) < intervals * KILLED.every else "missed",
            detail=f"{len(row[field])} kills, an interval is {KILLED.every} steps",
        )
        for field, (what, intervals) in LOST_INTERVALS.items()
        for row in rows.values()
    ]


def _cells(row: Row) -> list[str]:
    return [
        row["title"],
        f"{1e3 * statistics.median(row['pause_s']):.2f}",
        f"{1e3 * statistics.median(row['durable_s']):.0f}",
        f"{statistics.mean(row['stored_bytes']) / 1e6:.2f}",
        f"{row['writes']:.1f}",
        f"{row['written_bytes'] / 1e6:.2f}",
        *(
            f"{statistics.mean(lost):.1f} ({max(lost)}), {len(lost)}"
            for lost in (row["lost"], row["lost_both"])
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
