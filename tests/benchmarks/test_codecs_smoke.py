"""The benchmark of codecs measures what it says: a small run of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_small_run_measures_every_codec_and_judges_every_target(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / "codecs.py"), "--quick", "--repeats", "1"]
    done = subprocess.run(
        [*command, "--json", str(out)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    for dtype in ("float32", "bfloat16"):
        for data in ("weights", "exp_avg", "exp_avg_sq"):
            for codec in ("zstd-3", "DCP zstd", "zstd (ours)", "delta +10", "lossy-delta +1"):
                row = document["rows"][f"{dtype} {data} {codec}"]
                assert row["ratio"] > 1, row
                assert row["encode_mb_s"] > 0, row
                assert row["decode_mb_s"] > 0, row
        assert document["rows"][f"{dtype} exp_avg fp8"]["ratio"] > 2
        assert document["rows"][f"{dtype} exp_avg_sq fp8-sqrt"]["ratio"] > 2
    for name in ("LoRA: frozen GPT, adapters", "sparse-embedding recommender"):
        saved = document["rows"][name]
        assert max(saved["stored_bytes"][1:]) < saved["stored_bytes"][0] / 3, saved
    assert len(document["targets"]) == 17
    assert {target["verdict"] for target in document["targets"]} <= {"reached", "missed"}
