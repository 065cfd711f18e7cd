"""What a benchmark found, as people and programs read it. Knows nothing of how it was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from targets import Verdict


def show(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A drawn table on a terminal; tab-separated lines when piped."""
    if not sys.stdout.isatty():
        print("\t".join(columns))
        for line in lines:
            print("\t".join(line))
        return
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, cells)) for cells in zip(columns, *lines, strict=False)]
        for line in [columns, *lines]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)))
        return
    table = Table(*columns)
    for line in lines:
        table.add_row(*map(escape, line))
    Console().print(table)


def show_verdicts(verdicts: Iterable[Verdict]) -> None:
    """What was promised beside what came out."""
    show(
        ["target", "measured", "verdict", "from"],
        [[v.target, v.measured, v.verdict, v.detail] for v in verdicts],
    )


def write(
    path: Path,
    machine: Mapping[str, Any],
    rows: Mapping[str, Any],
    verdicts: Sequence[Verdict],
    *,
    quick: bool,
) -> None:
    """Every number as JSON."""
    document = {
        "machine": machine,
        "quick": quick,
        "rows": rows,
        "targets": [verdict.as_json() for verdict in verdicts],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
