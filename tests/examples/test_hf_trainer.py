"""The Hugging Face example, killed and run again, ends with the weights of one that was not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.examples.running import output, start, until

ARGUMENTS = ("--steps", 40, "--save-every", 5, "--width", 32, "--files", 4)


@pytest.mark.slow
def test_killed_with_sigkill_and_run_again_it_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected, _ = output(start("hf_trainer.py", "--run", whole, *ARGUMENTS, cwd=tmp_path), 0)
    for saves in (2, 5):
        process = start("hf_trainer.py", "--run", cut, *ARGUMENTS, cwd=tmp_path)
        manifest = cut / "checkpoints" / f"step-{saves * 5:010d}" / "manifest.json"
        until(manifest.exists)
        process.kill()
        output(process, -9)
        time.sleep(0.2)
    found, log = output(start("hf_trainer.py", "--run", cut, *ARGUMENTS, cwd=tmp_path), 0)
    assert log.count("goes on after step ") == 1
    assert found.splitlines()[-1].startswith("weights ")
    assert found.splitlines()[-1] == expected.splitlines()[-1]
