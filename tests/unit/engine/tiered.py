"""A run on local folders as root, archive and cache, for tests of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torch_ckpt import Checkpointer, KeepLast

SIZE = 3_000_000  # 12 MB: two blocks


def state_of(step: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(step)
    return {"large": torch.rand(SIZE, generator=made), "small": torch.rand(7), "step": step}


def tiers(tmp_path: Path, **changed: Any) -> Checkpointer:
    options: dict[str, Any] = {
        "archive": tmp_path / "archive",
        "archive_codec": "raw",  # what pays is for the machine to say
        "cache": tmp_path / "cache",
        "keep": KeepLast(1),
    }
    return Checkpointer(tmp_path / "root", **{**options, **changed})


def train(tmp_path: Path, *steps: int, **changed: Any) -> None:
    """Save steps of one run, each until the archive has it."""
    with tiers(tmp_path, **changed) as checkpointer:
        checkpointer.resume(state_of(0))
        for step in steps:
            checkpointer.save(state_of(step), step).wait("archived", 60)


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.parent.name[5:15]) for path in root.glob("*/manifest.json"))


def resume(tmp_path: Path, **changed: Any) -> tuple[int, str]:
    """The step that a new run of the same command starts from, and the tier that gave it."""
    state = state_of(0)
    with tiers(tmp_path, **changed) as checkpointer:
        generation = checkpointer.resume(state)
        assert generation is not None
        assert state["step"] == generation.step
        assert torch.equal(state["large"], state_of(generation.step)["large"])
    return generation.step, Path(generation.url).parent.name


def shard(root: Path, step: int) -> Path:
    return next(root.glob(f"step-{step:010d}/*.safetensors"))


def flip(path: Path, at: int = 9000) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
