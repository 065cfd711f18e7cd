"""How long saving stops training: this package beside its peers, one state, one run.

Starts every row in a fresh process, one after another, and shows what came back. Knows nothing of
how a row is measured; holds no numbers of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from machine import MARKER, MemoryWatch, machine_facts, machine_line
from row import ROWS
from table import show, show_verdicts, write
from targets import Verdict, judge

HERE = Path(__file__).resolve().parent
ROW_TIMEOUT_S = 900
COLUMNS = [
    "row",
    "first blocked s",
    "median blocked s",
    "durable s",
    "step slowdown",
    "lost s/save",
    "extra memory GB",
    "verified",
]
NOTES = """\
blocked: inside save() plus what the next update waits for the copy (median: without the first)
durable: from the call of save() until done and fsynced (*: the benchmark adds the fsync)
step slowdown: of steps beside the persisting; lost: blocked + what those steps took longer
extra memory: peak of all processes beyond training alone, shared pages once, without page cache
verified: whether the peer's own load refuses a file in which one byte was flipped"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    base: Path = options.dir or Path.cwd()
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="stall-", dir=base))
    rows: dict[str, dict[str, Any]] = {}
    try:
        facts = machine_facts(folder)
        print(machine_line(facts), flush=True)
        if facts["load_average"] > facts["cores"] / 2:
            print(f"NOT QUIET: a load of {facts['load_average']} beside it distorts every number")
        for name in options.rows:
            print(f"  running {name} …", end="", file=sys.stderr, flush=True)
            began = time.perf_counter()
            rows[name] = run_row(name, folder, quick=options.quick, saves=options.saves)
            print(f" {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    verdicts = judge(rows)
    _present(rows, verdicts)
    if options.json:
        write(options.json, facts, rows, verdicts, quick=options.quick)
    return 1 if any("failed" in row for row in rows.values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dir", type=Path, help="where to write; a temporary folder inside it")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    parser.add_argument("--quick", action="store_true", help="a small state: a smoke test only")
    parser.add_argument("--saves", type=int, default=4, help="saves a row, at least 2")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=list(ROWS), help="only these, in this order"
    )
    return parser


def run_row(name: str, base: Path, *, quick: bool, saves: int) -> dict[str, Any]:
    """One row in its own process: its numbers, or `unavailable` or `failed` with the reason."""
    folder, mark = base / name, uuid.uuid4().hex
    folder.mkdir()
    command = [sys.executable, str(HERE / "row.py"), name, "--dir", str(folder)]
    command += ["--saves", str(max(2, saves)), *(["--quick"] if quick else [])]
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, MARKER: mark, "PYTHONPATH": path}
    result: dict[str, Any] = {}
    log_path = base / f"{name}.log"
    with log_path.open("wb") as log, MemoryWatch(mark) as memory:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
        )
        timer = threading.Timer(ROW_TIMEOUT_S, process.kill)
        timer.start()
        try:
            for line in process.stdout or ():
                message = json.loads(line)
                if "phase" in message:
                    memory.enter(message["phase"])
                else:
                    result = message
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if "title" in result:
        extra = memory.peak_bytes("saves") - memory.peak_bytes("baseline")
        result["extra_memory_bytes"] = max(0, extra)
    elif "unavailable" not in result:
        said = log_path.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
        result = {"failed": said[-1], "log": said[-40:]}
    shutil.rmtree(folder, ignore_errors=True)
    return {"title": ROWS[name].title, **result}


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    if "state_bytes" not in row:
        reason = row.get("unavailable")
        told = f"does not run here: {reason}" if reason else f"FAILED: {row['failed']}"
        return [row["title"], told]
    star = "" if ROWS[name].fsyncs else "*"
    durable, slowdown = row["durable_s"], row["slowdown"]
    return [
        row["title"],
        f"{row['first_blocked_s']:.4f}",
        f"{row['median_blocked_s']:.4f}",
        "–" if durable is None else f"{durable:.2f}{star}",
        "–" if slowdown is None else f"{slowdown:+.0%}",
        f"{row['lost_s']:.3f}",
        f"{row['extra_memory_bytes'] / 1e9:.2f}",
        row["verified"] or "–",
    ]


def _present(rows: dict[str, dict[str, Any]], verdicts: Iterable[Verdict]) -> None:
    measured = [row for row in rows.values() if "state_bytes" in row]
    if measured:
        size, step = measured[0]["state_bytes"], max(row["step_s"] for row in measured)
        print(f"state {size / 1e9:.3f} GB of fp32 weights and AdamW moments; step ≤ {step:.2f} s")
    show(COLUMNS, [_cells(name, row) for name, row in rows.items()])
    print(NOTES)
    show_verdicts(verdicts)


if __name__ == "__main__":
    sys.exit(main())
