"""The plain loop, killed and started again, ends with every bit of the run it would have been."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples.running import output, start, until
from torch_ckpt import load_generation

STEPS, EVERY = 600, 25


def loop(folder: Path, name: str, **options: Any) -> Any:
    arguments = ("--root", folder / name, "--steps", STEPS, "--save-every", EVERY)
    return start("plain_loop.py", *arguments, cwd=folder, **options)


def generations(root: Path) -> set[str]:
    return {path.parent.name for path in root.glob("*/manifest.json")}


def check_same(one: Any, other: Any, path: str = "state") -> None:
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            check_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            check_same(mine, theirs, f"{path}.{index}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), path
    else:
        assert one == other, path


def test_killed_and_started_again_it_ends_bitwise_the_same(tmp_path: Path) -> None:
    output(loop(tmp_path, "whole"), 0)

    killed = loop(tmp_path, "killed")
    seen: set[str] = set()

    def has_saved_twice() -> bool:
        seen.update(generations(tmp_path / "killed"))
        return len(seen) >= 2

    until(has_saved_twice)
    killed.kill()
    out, _ = output(killed, -9)
    assert f"step {STEPS} " not in out, "it was killed too late"

    out, err = output(loop(tmp_path, "killed"), 0)
    assert err == ""
    resumed = re.match(r"resumed at step (\d+)\n", out)
    assert resumed is not None, out
    assert int(resumed[1]) >= 2 * EVERY
    whole, again = (load_generation(tmp_path / name, STEPS) for name in ("whole", "killed"))
    check_same(whole, again)
    assert whole["place"]["step"] == STEPS


@pytest.mark.slow
def test_run_once_more_after_the_end_it_does_nothing(tmp_path: Path) -> None:
    arguments = ("--root", tmp_path / "run", "--steps", 4, "--save-every", 2)
    output(start("plain_loop.py", *arguments, cwd=tmp_path), 0)
    before = generations(tmp_path / "run")
    out, _ = output(start("plain_loop.py", *arguments, cwd=tmp_path), 0)
    assert out == "resumed at step 4\n"
    assert generations(tmp_path / "run") == before
