"""What commands print: tables on a terminal, aligned text elsewhere, or one JSON document.

Knows streams and text. Knows nothing of generations.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_GAP = "  "
NOTHING = "-"
"""Stands in an empty cell, so that every row has all its columns."""


def printable(text: str) -> str:
    """Text that cannot move a cursor or break a line, whoever chose it."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def print_json(document: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(_finite(document), indent=2, allow_nan=False))


def print_line(text: str) -> None:
    """Print one line."""
    print(printable(text))


def note(text: str) -> None:
    """Say on stderr what is no part of the answer."""
    print(f"torch-ckpt: {printable(text)}", file=sys.stderr)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()
) -> None:
    """Print rows under a heading; on a terminal with rules and folded to its width."""
    cells = [[printable(cell) or NOTHING for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(columns, cells, right)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), *cells]:
        padded = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ]
        print(_GAP.join(padded).rstrip())


def _print_rich(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str]
) -> None:
    # Imported here: it takes as long as all the rest of `ls`, and only terminals need it.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        justify = "right" if name in right else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in right)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def size(count: int) -> str:
    """Bytes for people, in powers of 1000: `1.2GB`; one word, which `sort -h` understands."""
    power, value = 0, float(count)
    while value >= 999.5 and power < len(_UNITS) - 1:
        power, value = power + 1, value / 1000
    return f"{count}B" if power == 0 else f"{value:.3g}{_UNITS[power]}"


def number(value: float) -> str:
    """A number for people."""
    return f"{value:.6g}"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Metrics as one word."""
    return ",".join(f"{name}={number(value)}" for name, value in metrics.items())


def moment(created: str) -> str:
    """A manifest's time to the second."""
    if created.endswith(("+00:00", "Z")):
        return created.removesuffix("Z").removesuffix("+00:00").partition(".")[0] + "Z"
    return created


def counted(count: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _finite(document: Any) -> Any:
    """The same document with floats that JSON lacks as `"nan"`, `"inf"` and `"-inf"`."""
    if isinstance(document, float) and not math.isfinite(document):
        return str(document)
    if isinstance(document, Mapping):
        return {key: _finite(item) for key, item in document.items()}
    if isinstance(document, (list, tuple)):
        return [_finite(item) for item in document]
    return document
