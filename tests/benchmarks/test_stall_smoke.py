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
    ours = ["ours-eager", "ours-overlapped", "accelerate-ckpt"]
    rows = ["floor", *ours, "torch-save", "accelerate", "trainer", "trainer-overlapped"]
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
    for name in ours:
        assert document["rows"][name]["verified"].startswith("yes")
    verdicts = {target["target"]: target["verdict"] for target in document["targets"]}
    assert {name for name in verdicts if verdicts[name] == "not measured"} == {
        "trainer-eager blocked, median ≤ 0.25 × trainer"
    }
    assert list((tmp_path / "run").iterdir()) == []


def test_a_framework_with_us_is_judged_by_the_same_run_without(targets):
    rows = {
        "trainer": {"median_blocked_s": 2.0},
        "trainer-eager": {"median_blocked_s": 0.4},
        "trainer-overlapped": {"median_blocked_s": 0.2},
    }
    found = {verdict.target.split(" ")[0]: verdict.verdict for verdict in targets.judge(rows)}
    assert found["trainer-eager"] == "reached"
    assert found["trainer-overlapped"] == "missed"
    assert found["accelerate-ckpt"] == "not measured"
