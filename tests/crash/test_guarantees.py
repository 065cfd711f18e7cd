"""Every row of the crash table names a test that exists, and every crash test has its row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = HERE.parent.parent / "docs" / "guarantees.md"
LISTED = (
    "test_crash_points.py",
    "test_kills.py",
    "test_limits.py",
    "test_corruption.py",
    "test_mutation.py",
    "tests/distributed/test_votes.py",
    "tests/distributed/test_round_trips.py",
    "tests/distributed/test_sharded_optimizers.py",
    "tests/distributed/test_reading.py",
    "tests/distributed/test_failed_loads.py",
    "tests/distributed/test_refused_states.py",
    "tests/distributed/test_sharded_kills.py",
    "tests/distributed/test_user_collectives.py",
)
CONTROLS = {"test_rewriting_alone_changes_nothing"}
"""What shows that other tests could fail."""


def claims_of(file: str) -> set[str]:
    tree = ast.parse((HERE.parent.parent / file if "/" in file else HERE / file).read_text())
    return {
        f"{file}::{node.name}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and node.name not in CONTROLS
    }


def test_every_row_names_an_existing_test_and_every_crash_test_has_a_row() -> None:
    named = set(re.findall(r"`((?:tests/[\w/]+/)?test_\w+\.py::test_\w+)`", TABLE.read_text()))
    elsewhere = {name.partition("::")[0] for name in named} - set(LISTED)
    claims = set().union(*map(claims_of, LISTED))
    assert claims <= named
    assert named <= claims.union(*map(claims_of, elsewhere))
    for row in TABLE.read_text().splitlines():
        if row.startswith("| ") and "what holds" not in row:
            assert re.search(r"`(tests/[\w/]+/)?test_\w+\.py(::test_\w+)?` \|$", row), row
