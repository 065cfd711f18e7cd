"""The benchmark measures what it says: a small run of it, and verdicts on numbers made up here."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GB = 10**9
EAGER = {
    "state_bytes": GB,
    "step_s": 1.0,
    "starting_step_s": 1.02,
    "start_s": 0.02,
    "first_blocked_s": 0.12,
    "median_blocked_s": 0.11,
    "floor_s": [0.1, 0.09, 0.4],
    "persist_s": [0.4],
    "direct_write_s": [0.3],
    "sha256_s": [0.35],
    "load_s": [0.4],
    "safetensors_s": [0.1],
}


@pytest.fixture(scope="module")
def targets():
    spec = importlib.util.spec_from_file_location("stall_targets", BENCHMARKS / "targets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def verdicts(targets, **changed):
    found = targets.judge({"ours-eager": {**EAGER, **changed}})
    return {verdict.target.split(" ")[0]: verdict.verdict for verdict in reversed(found)}


def test_numbers_within_their_limits_are_reached(targets):
    found = verdicts(targets)
    assert found["eager"] == found["persist"] == found["start"] == "reached"


def test_numbers_beyond_their_limits_are_missed(targets):
    found = verdicts(targets, first_blocked_s=0.13, persist_s=[0.5], start_s=0.06, load_s=[0.5])
    assert found["eager"] == found["persist"] == found["start"] == "missed"
    assert found["verified"] == "missed"


def test_a_load_that_hashing_holds_back_is_told_apart_from_a_slow_one(targets):
    assert verdicts(targets)["verified"] == "bound"
    assert verdicts(targets, safetensors_s=[0.39])["verified"] == "reached"


def test_a_run_without_our_rows_promises_nothing(targets):
    assert {verdict.verdict for verdict in targets.judge({})} == {"not measured"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_small_run_fills_every_column_and_leaves_nothing(tmp_path):
    rows = ["floor", "ours-eager", "ours-overlapped", "torch-save"]
    command = [sys.executable, str(BENCHMARKS / "stall.py"), "--quick", "--saves", "2"]
    command += ["--dir", str(tmp_path / "run"), "--json", str(tmp_path / "out.json")]
    done = subprocess.run([*command, "--rows", *rows], capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert list(document["rows"]) == rows
    for name, row in document["rows"].items():
        assert row["first_blocked_s"] > 0, name
        assert row["median_blocked_s"] > 0, name
        assert row["extra_memory_bytes"] >= 0, name
        assert name == "floor" or row["durable_s"] > 0, name
    assert document["rows"]["torch-save"]["verified"] == "no"
    assert document["rows"]["ours-eager"]["verified"].startswith("yes")
    assert document["rows"]["ours-overlapped"]["verified"].startswith("yes")
    assert {target["verdict"] for target in document["targets"]} <= {"reached", "missed", "bound"}
    assert list((tmp_path / "run").iterdir()) == []
