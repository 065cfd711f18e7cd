"""The benchmark of opening measures what it says: few ranks, all three ways."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_small_run_opens_alone_and_among_others_and_beside_dcp(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / "opening.py"), "--quick", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == ["alone", "one of many", "DCP"]
    assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in rows.values())
