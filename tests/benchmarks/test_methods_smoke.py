"""The benchmark of methods measures what it says: a small run of it, with real kills."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_small_run_of_methods_measures_saves_and_what_kills_cost(tmp_path):
    folder, out = tmp_path / "run", tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / "methods.py"), "--quick", "--kills", "2"]
    command += ["--methods", "sync", "two-slabs", "lossy", "--dir", str(folder)]
    done = subprocess.run(
        [*command, "--json", str(out)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == ["sync", "two-slabs", "lossy"]
    for row in rows.values():
        assert len(row["pause_s"]) == len(row["durable_s"]) == len(row["stored_bytes"]) == 9
        assert row["writes"] > 1
        assert row["written_bytes"] > 0.9 * sum(row["stored_bytes"]) / 9
        assert len(row["lost"]) == len(row["lost_both"]) == 2
        assert all(steps >= 0 for steps in row["lost"] + row["lost_both"]), row
    assert min(rows["sync"]["stored_bytes"]) > rows["sync"]["raw_bytes"]
    assert min(rows["lossy"]["stored_bytes"]) < rows["lossy"]["raw_bytes"] / 1.5
    assert list(folder.iterdir()) == []
