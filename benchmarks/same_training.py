"""Does training go on the same from a generation that is stored with a loss?

Trains a small GPT with several seeds, resumes it at three points from what each method gives back,
goes on with the same batches, and holds the losses on unseen text against the lossless resume and
the spread of seeds. Holds no numbers of its own.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from machine import machine_facts, machine_line
from same_training_job import LOSSLESS, Plan, measure
from same_training_plot import Group, drawn
from table import show, show_verdicts, write
from targets import Verdict

# A chain is a whole generation and 8 changes: each point is the end of one, 8 lossy links long.
FULL = Plan(width=96, layers=2, every=20, points=(9, 18, 27), further=120)
QUICK = Plan(width=32, layers=1, every=2, points=(3, 4), further=5)
SEEDS = 4
ERROR = 1 / 16
COLUMNS = [
    "resumed at step",
    "from",
    "raw / stored",
    "loss at once",
    "loss further on",
    "difference: mean",
    "largest",
    "spread of seeds",
]
NOTES = """\
losses: on text that nothing was trained on, mean of the seeds; further on: after the same batches
difference: to the lossless resume of the same seed; spread: standard deviation of the lossless
losses over the seeds; noise: after a lossless resume, each weight changed by a millionth"""

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    plan = QUICK if options.quick else FULL
    facts = machine_facts(Path.cwd()) | {"plan": plan._asdict(), "error": options.error}
    print(machine_line(facts), flush=True)
    seeds = range(options.seeds)
    with ProcessPoolExecutor(facts["cores"], get_context("spawn")) as pool:
        taken = pool.map(measure, *zip(*((plan, s, options.error) for s in seeds), strict=True))
        found = list(itertools.chain.from_iterable(taken))
    rows = summed_up(found)
    print(
        f"{plan.steps} steps, saved every {plan.every}; resumed for {plan.further} more; "
        f"{options.seeds} seeds; lossy_delta={options.error:g}"
    )
    show(COLUMNS, [_cells(row) for row in rows.values()])
    print(NOTES)
    verdicts = judge(rows)
    show_verdicts(verdicts)
    if options.svg:
        options.svg.write_text(_plot(rows, plan))
    if options.json:
        write(options.json, facts | {"resumes": found}, rows, verdicts, quick=options.quick)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    parser.add_argument("--svg", type=Path, help="also draw the differences into this file")
    parser.add_argument("--quick", action="store_true", help="a small state: a smoke test only")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="at least 3")
    parser.add_argument("--error", type=float, default=ERROR, help="of the lossy deltas")
    return parser


def summed_up(found: Sequence[Row]) -> dict[str, Row]:
    """One row for each point and method, over the seeds."""
    rows: dict[str, Row] = {}
    losses = {(one["step"], one["method"], one["seed"]): one for one in found}
    for step, method in dict.fromkeys((one["step"], one["method"]) for one in found):
        here = [one for one in found if (one["step"], one["method"]) == (step, method)]
        same = [losses[step, LOSSLESS, one["seed"]]["loss_further"] for one in here]
        rows[f"{step} {method}"] = {
            "step": step,
            "method": method,
            "lossy": here[0]["lossy"],
            "ratio": statistics.mean(one["raw_bytes"] / one["stored_bytes"] for one in here),
            "loss_resumed": statistics.mean(one["loss_resumed"] for one in here),
            "loss_further": statistics.mean(one["loss_further"] for one in here),
            "differences": [
                one["loss_further"] - loss for one, loss in zip(here, same, strict=True)
            ],
            "spread": statistics.stdev(same),
        }
    return rows


def judge(rows: dict[str, Row]) -> list[Verdict]:
    """No seed ends further from its lossless resume than seeds are from one another."""
    verdicts = []
    for row in rows.values():
        if row["lossy"] is None:
            continue
        largest = max(map(abs, row["differences"]))
        verdicts.append(
            Verdict(
                target=f"{row['method']}, resumed at {row['step']}: within the spread of seeds",
                measured=f"{largest / row['spread']:.2f} ×",
                verdict="reached" if largest <= row["spread"] else "missed",
                detail=f"largest of {len(row['differences'])} differences {largest:.4f}; "
                f"standard deviation of seeds {row['spread']:.4f}",
            )
        )
    return verdicts


def _cells(row: Row) -> list[str]:
    differences = row["differences"]
    return [
        str(row["step"]),
        row["method"],
        f"{row['ratio']:.2f}",
        f"{row['loss_resumed']:.4f}",
        f"{row['loss_further']:.4f}",
        f"{statistics.mean(differences):+.4f}",
        f"{max(differences, key=abs):+.4f}",
        f"{row['spread']:.4f}",
    ]


def _plot(rows: dict[str, Row], plan: Plan) -> str:
    groups = []
    for step in dict.fromkeys(row["step"] for row in rows.values()):
        here = [row for row in rows.values() if row["step"] == step]
        dots = {row["method"]: row["differences"] for row in here if row["method"] != LOSSLESS}
        groups.append(Group(f"resumed at step {step}", here[0]["spread"], dots))
    title = f"Loss {plan.further} steps after a resume, less that of the lossless resume"
    return drawn(groups, title)


if __name__ == "__main__":
    sys.exit(main())
