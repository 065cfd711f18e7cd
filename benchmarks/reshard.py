"""Loading under another sharding: this package beside DCP, one state, one run.

Both sides save the same state and load it under every other sharding, each load in fresh
processes, by turns. Holds no numbers of its own. Knows nothing of how a load is measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import machine_facts, machine_line
from ranks import run_ranks
from reshard_job import FULL, QUICK, Loaded, Sharding, Side, Size, flips, load_once, save_both
from table import show, show_verdicts, write
from targets import Verdict

SIDES: tuple[Side, Side] = ("ours", "dcp")
READ_OF_UNIQUE = 1.1
"""How much more than the bytes of the state all ranks together may read."""

COLUMNS = [
    "row",
    "side",
    "seconds",
    "cpu s",
    "read GB",
    "of state",
    "memory MB/rank",
    "right",
    "flip found",
]
NOTES = """\
seconds: the slowest rank, median of the repeats; files are in the page cache on both sides
cpu: of all ranks together, less at the mercy of what else runs on the machine
read: what system calls of all ranks read from files; of state: that, over the bytes of the state
memory: the peak of the rank that takes most, beyond its state
right: every element of every rank compared; flip found: one byte flipped, and the load refused"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """From one sharding to another."""

    saved: tuple[int, Sharding]
    loaded: tuple[int, Sharding]

    @property
    def title(self) -> str:
        into = f"{self.loaded[0]} {self.loaded[1]}".removesuffix(" fsdp").removesuffix(" whole")
        return f"{self.saved[0]} → {into}"


ROWS = {
    "4-2": Row(saved=(4, "fsdp"), loaded=(2, "fsdp")),
    "4-1": Row(saved=(4, "fsdp"), loaded=(1, "whole")),
    "1-4": Row(saved=(1, "whole"), loaded=(4, "fsdp")),
    "4-4": Row(saved=(4, "fsdp"), loaded=(4, "fsdp")),
    "2-4-hsdp": Row(saved=(2, "fsdp"), loaded=(4, "hsdp")),
    "1-4-dim-1": Row(saved=(1, "whole"), loaded=(4, "fsdp dim 1")),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    base: Path = options.dir or Path.cwd()
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="reshard-", dir=base))
    size = QUICK if options.quick else FULL
    rows: dict[str, dict[str, Any]] = {}
    try:
        facts = machine_facts(folder)
        print(machine_line(facts), flush=True)
        if facts["load_average"] > facts["cores"] / 2:
            print(f"NOT QUIET: a load of {facts['load_average']} beside it distorts every number")
        for name in options.rows:
            print(f"  running {name} …", end="", file=sys.stderr, flush=True)
            began = time.perf_counter()
            rows[name] = run_row(ROWS[name], folder, size, options.repeats)
            print(f" {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    verdicts = judge(rows)
    _present(rows, verdicts)
    if options.json:
        write(options.json, facts, rows, verdicts, quick=options.quick)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dir", type=Path, help="where to write; a temporary folder inside it")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    parser.add_argument("--quick", action="store_true", help="a small state: a smoke test only")
    parser.add_argument("--repeats", type=int, default=3, help="loads a row and side")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=list(ROWS), help="only these, in this order"
    )
    return parser


def run_row(row: Row, base: Path, size: Size, repeats: int) -> dict[str, Any]:
    """Both sides of one row, by turns."""
    root = base / f"{row.saved[0]}-{row.saved[1]}"
    if not root.exists():
        root.mkdir()
        run_ranks(save_both, row.saved[0], root, size, row.saved[1])
    _into_page_cache(root)
    sides: dict[Side, list[list[Loaded]]] = {side: [] for side in SIDES}
    for repeat in range(repeats):
        for side in SIDES if repeat % 2 == 0 else SIDES[::-1]:
            loads = run_ranks(load_once, row.loaded[0], side, root, size, row.loaded[1])
            sides[side].append(loads)
    result: dict[str, Any] = {"title": row.title, "state_bytes": _state_bytes(size)}
    for side, loads in sides.items():
        result[side] = _summary(loads) | {"flip_found": _finds_flip(row, root, size, side)}
    return result


def _state_bytes(size: Size) -> int:
    layer = 2 * size.width * size.hidden + size.hidden + size.width + 2 * size.width
    return 3 * 4 * size.layers * layer


def _into_page_cache(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            path.read_bytes()


def _summary(loads: list[list[Loaded]]) -> dict[str, Any]:
    return {
        "seconds": statistics.median(max(one.seconds for one in ranks) for ranks in loads),
        "cpu_s": statistics.median(sum(one.cpu_s for one in ranks) for ranks in loads),
        "read_bytes": statistics.median(sum(one.read_bytes for one in ranks) for ranks in loads),
        "memory_bytes": statistics.median(
            max(one.memory_bytes for one in ranks) for ranks in loads
        ),
        "wrong": sorted({name for ranks in loads for one in ranks for name in one.wrong}),
        "repeats": [[asdict(one) for one in ranks] for ranks in loads],
    }


def _finds_flip(row: Row, root: Path, size: Size, side: Side) -> str | None:
    """Flip one byte in the middle of the largest file, load, and flip it back."""
    files = [path for path in (root / side).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    _flip(largest)
    try:
        errors = run_ranks(flips, row.loaded[0], side, root, size, row.loaded[1])
    finally:
        _flip(largest)
    return None if None in errors else " ".join(sorted(set(errors)))


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def judge(rows: dict[str, dict[str, Any]]) -> list[Verdict]:
    """Ahead of DCP in seconds, bytes and memory of every row, all of it right and verified."""
    verdicts = []
    for row in rows.values():
        ours, peer = row["ours"], row["dcp"]
        for field, what in (
            ("seconds", "seconds"),
            ("read_bytes", "bytes read"),
            ("memory_bytes", "peak memory"),
        ):
            verdicts.append(
                Verdict(
                    target=f"{row['title']}: {what} less than DCP's",
                    measured=f"{ours[field] / peer[field]:.2f} ×" if peer[field] else "–",
                    verdict="reached" if ours[field] < peer[field] else "missed",
                    detail=f"{_shown(field, ours[field])}; DCP {_shown(field, peer[field])}",
                )
            )
        of_state = ours["read_bytes"] / row["state_bytes"]
        verdicts.append(
            Verdict(
                target=f"{row['title']}: reads ≤ {READ_OF_UNIQUE} × the state, right and verified",
                measured=f"{of_state:.2f} ×",
                verdict="reached"
                if of_state <= READ_OF_UNIQUE and not ours["wrong"] and ours["flip_found"]
                else "missed",
                detail=f"wrong: {len(ours['wrong'])} tensors; a flip: {ours['flip_found']}",
            )
        )
    return verdicts


def _shown(field: str, value: float) -> str:
    if field == "seconds":
        return f"{value:.3f} s"
    return f"{value / 1e6:.1f} MB"


def _present(rows: dict[str, dict[str, Any]], verdicts: list[Verdict]) -> None:
    for row in rows.values():
        print(f"state {row['state_bytes'] / 1e9:.3f} GB: fp32 weights and two moments, FSDP2")
        break
    show(COLUMNS, [_cells(row, side) for row in rows.values() for side in SIDES])
    print(NOTES)
    show_verdicts(verdicts)


def _cells(row: dict[str, Any], side: Side) -> list[str]:
    one = row[side]
    return [
        row["title"],
        {"ours": "torch-ckpt", "dcp": "DCP"}[side],
        f"{one['seconds']:.3f}",
        f"{one['cpu_s']:.3f}",
        f"{one['read_bytes'] / 1e9:.3f}",
        f"{one['read_bytes'] / row['state_bytes']:.2f} ×",
        f"{one['memory_bytes'] / 1e6:.1f}",
        "no" if one["wrong"] else "yes",
        one["flip_found"] or "no",
    ]


if __name__ == "__main__":
    sys.exit(main())
