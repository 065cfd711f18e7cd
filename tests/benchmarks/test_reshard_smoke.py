"""The benchmarks of resharding and planning measure what they say: small runs of both."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script: str, json_file: Path, *arguments: str) -> dict:
    command = [sys.executable, str(BENCHMARKS / script), "--quick", "--repeats", "1"]
    command += ["--json", str(json_file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(json_file.read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_small_resharding_run_compares_every_element_and_leaves_nothing(tmp_path):
    rows = ["4-2", "2-4-hsdp", "1-4-dim-1"]
    folder = tmp_path / "run"
    out = tmp_path / "out.json"
    document = run("reshard.py", out, "--dir", str(folder), "--rows", *rows)
    assert list(document["rows"]) == rows
    for name, row in document["rows"].items():
        assert row["ours"]["flip_found"], name
        for side in ("ours", "dcp"):
            assert row[side]["wrong"] == [], name
            assert row[side]["seconds"] > 0, name
            assert row[side]["read_bytes"] > row["state_bytes"], name
    assert {target["verdict"] for target in document["targets"]} <= {"reached", "missed"}
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_small_planning_run_judges_every_target(tmp_path):
    document = run("planning.py", tmp_path / "out.json")
    assert list(document["rows"]) == ["real-2", "many"]
    many = document["rows"]["many"]["ours"]
    assert many["later_sent_bytes"] < 100
    assert len(document["targets"]) == 7
    assert {target["verdict"] for target in document["targets"]} <= {"reached", "missed"}
