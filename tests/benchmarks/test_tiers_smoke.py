"""The benchmark of tiers measures what it says: a small run against the server of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_small_run_of_tiers_restores_what_it_sent_and_resumes_from_each(tmp_path):
    folder, out = tmp_path / "run", tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / "tiers.py"), "--quick", "--repeats", "1"]
    command += ["--rows", "ours", "obstore-memory", "--dir", str(folder), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    run = found["rows"]["sink"]
    for row in run["rows"].values():
        for direction in ("up", "down"):
            (taken,) = row[direction][str(16 << 20)]
            assert taken["seconds"] > 0
            assert taken["cpu_s"] > 0
    assert list(run["restarts"]) == ["cache", "primary", "archive"]
    assert all(tier["step"] == 4 and tier["seconds"] > 0 for tier in run["restarts"].values())
    speed, memory = found["targets"][::2], found["targets"][1::2]
    assert {target["verdict"] for target in speed} <= {"reached", "missed", "bound"}
    assert {target["verdict"] for target in memory} == {"not measured"}
    assert list(folder.iterdir()) == []
