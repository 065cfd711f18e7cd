"""The benchmark of training after a lossy resume measures what it says: a small run of it."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_small_run_resumes_from_lossy_generations_and_draws_the_differences(tmp_path):
    out, drawing = tmp_path / "out.json", tmp_path / "out.svg"
    command = [sys.executable, str(BENCHMARKS / "same_training.py"), "--quick", "--seeds", "3"]
    command += ["--json", str(out), "--svg", str(drawing)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    for step in (6, 8):
        assert rows[f"{step} lossless"]["differences"] == [0.0, 0.0, 0.0]
        assert rows[f"{step} lossless"]["lossy"] is None
        for method in ("fp8", "lossy-delta", "both"):
            row = rows[f"{step} {method}"]
            assert row["lossy"], row
            assert row["ratio"] > 1.2 * rows[f"{step} lossless"]["ratio"], row
            assert any(row["differences"]), row
    dots = ElementTree.parse(drawing).getroot().findall("{http://www.w3.org/2000/svg}circle")
    assert len(dots) == 2 * 4 * 3 + 4  # points, methods, seeds, and the legend
    assert {path.name for path in tmp_path.iterdir()} == {"out.json", "out.svg"}
