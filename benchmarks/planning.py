"""What planning a save costs: this package beside DCP, the same states, one run.

On real ranks over gloo, and on one of very many whose peers are made up. Holds no numbers of its
own. Knows nothing of how either side plans.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import machine_facts, machine_line
from planning_job import plan_for_real, simulate_dcp, simulate_ours
from ranks import run_ranks
from table import show, show_verdicts, write
from targets import Verdict

LATER_S = 0.05
SENT_BYTES = 100
COLUMNS = [
    "ranks",
    "tensors",
    "side",
    "first save s",
    "later save s",
    "sent by a rank",
    "memory MB",
]
NOTES = """\
seconds on the coordinator from the state to its plan, median; saving itself is not in them
DCP: dcp.save up to the write, with DefaultSavePlanner; caching: with enable_plan_caching, whose
key ignores dtypes and nesting; made up: one rank computes, what its peers would send is given
sent: at a later save; DCP (made up): create_global_plan alone, without gathering and scattering"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    facts = machine_facts(Path.cwd())
    print(machine_line(facts), flush=True)
    if facts["load_average"] > facts["cores"] / 2:
        print(f"NOT QUIET: a load of {facts['load_average']} beside it distorts every number")
    ranks, many = ([2], 16) if options.quick else ([4, 8], options.many)
    tensors = 20 if options.quick else 1000
    rows: dict[str, dict[str, Any]] = {}
    for world_size in ranks:
        with _Said(f"{world_size} ranks"):
            rows[f"real-{world_size}"] = real(world_size, tensors, options.repeats)
    with _Said(f"{many} ranks, made up"):
        rows["many"] = made_up(many, tensors, options.repeats)
    verdicts = judge(rows)
    show(COLUMNS, [cells for row in rows.values() for cells in _cells(row)])
    print(NOTES)
    show_verdicts(verdicts)
    if options.json:
        write(options.json, facts, rows, verdicts, quick=options.quick)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    parser.add_argument("--quick", action="store_true", help="a small state: a smoke test only")
    parser.add_argument("--repeats", type=int, default=5, help="plans a side")
    parser.add_argument("--many", type=int, default=1024, help="how many ranks to make up")
    return parser


class _Said:
    """Says what is running, and how long it took."""

    def __init__(self, what: str) -> None:
        print(f"  running {what} …", end="", file=sys.stderr, flush=True)
        self._began = time.perf_counter()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        print(f" {time.perf_counter() - self._began:.0f} s", file=sys.stderr, flush=True)


def real(world_size: int, tensors: int, repeats: int) -> dict[str, Any]:
    """Both sides on real ranks; the numbers of rank 0."""
    seconds = run_ranks(plan_for_real, world_size, tensors, repeats)[0]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"ranks": world_size, "tensors": tensors, "seconds": medians, "repeats": seconds}


def made_up(many: int, tensors: int, repeats: int) -> dict[str, Any]:
    """One rank of many, and DCP's coordinator of as many as it can do in a minute."""
    [ours] = run_ranks(simulate_ours, 1, many, tensors, repeats)
    [peer] = run_ranks(simulate_dcp, 1, many, tensors)
    return {"ranks": many, "tensors": tensors, "ours": ours, "dcp": peer}


def judge(rows: dict[str, dict[str, Any]]) -> list[Verdict]:
    """Ahead of DCP wherever both were measured, and within what was promised for very many."""
    verdicts = []
    for name, row in rows.items():
        if name == "many":
            continue
        seconds = row["seconds"]
        for when in ("first", "later"):
            ours = seconds[f"ours {when}"]
            for peer in ("dcp", "dcp cached"):
                theirs = seconds[f"{peer} {when}"]
                verdicts.append(
                    Verdict(
                        target=f"{row['ranks']} ranks, {when} plan: less than {_names[peer]}",
                        measured=f"{ours / theirs:.2f} ×",
                        verdict="reached" if ours < theirs else "missed",
                        detail=f"{ours * 1e3:.1f} ms; {_names[peer]} {theirs * 1e3:.1f} ms",
                    )
                )
    if "many" in rows:
        verdicts += _judge_many(rows["many"])
    return verdicts


_names = {"dcp": "DCP", "dcp cached": "DCP caching"}


def _judge_many(row: dict[str, Any]) -> list[Verdict]:
    ours, peer = row["ours"], row["dcp"]
    first, later = statistics.median(ours["first"]), statistics.median(ours["later"])
    sent = ours["later_sent_bytes"]
    return [
        Verdict(
            target=f"{row['ranks']} ranks, later plan < {LATER_S * 1e3:.0f} ms",
            measured=f"{later * 1e3:.1f} ms",
            verdict="reached" if later < LATER_S else "missed",
            detail=f"worst of {len(ours['later'])}: {max(ours['later']) * 1e3:.1f} ms",
        ),
        Verdict(
            target=f"{row['ranks']} ranks, later plan: tens of bytes a rank",
            measured=f"{sent} bytes",
            verdict="reached" if sent < SENT_BYTES else "missed",
            detail=f"at the first plan {ours['first_sent_bytes'] / 1e3:.0f} kB",
        ),
        Verdict(
            target=f"{row['ranks']} ranks, first plan: less than DCP's on {peer['ranks']}",
            measured=f"{first / peer['seconds']:.2f} ×",
            verdict="reached" if first < peer["seconds"] else "missed",
            detail=f"{first:.2f} s on {row['ranks']} ranks; DCP {peer['seconds']:.2f} s "
            f"on {peer['ranks']}",
        ),
    ]


def _cells(row: dict[str, Any]) -> list[list[str]]:
    ranks, tensors = str(row["ranks"]), str(row["tensors"])
    if "seconds" in row:
        seconds = row["seconds"]
        return [
            [ranks, tensors, title, *(f"{seconds[f'{side} {w}']:.4f}" for w in when), "–", "–"]
            for side, title in (("ours", "torch-ckpt"), *_names.items())
            for when in (("first", "later"),)
        ]
    ours, peer = row["ours"], row["dcp"]
    medians = [f"{statistics.median(ours[when]):.4f}" for when in ("first", "later")]
    sent, memory = f"{ours['later_sent_bytes']} bytes", f"{ours['memory_bytes'] / 1e6:.0f}"
    gathered = f"{peer['gathered_bytes'] / peer['ranks'] / 1e3:.0f} kB"
    taken = f"{peer['memory_bytes'] / 1e6:.0f}"
    again = f"{peer['seconds']:.4f}"
    return [
        [ranks, tensors, "torch-ckpt (made up)", *medians, sent, memory],
        [str(peer["ranks"]), tensors, "DCP (made up)", again, "the same", gathered, taken],
    ]


if __name__ == "__main__":
    sys.exit(main())
