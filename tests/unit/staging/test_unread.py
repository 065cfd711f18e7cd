"""What a stateful object does not want of its saved state is not read, nor asked about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt import IntegrityError, load_generation, save_generation


class Weights:
    """Takes the state but for some keys."""

    def __init__(self, *unread: str) -> None:
        self.weight, self.unread_keys = torch.zeros(4), unread
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_key_that_is_not_wanted_is_left_unread_also_if_it_is_damaged(tmp_path: Path) -> None:
    large = torch.ones(3_000_000)  # in blocks of its own
    saved = save_generation(tmp_path, {"weight": torch.ones(4), "moments": large, "step": 3}, 3)
    shard = next((tmp_path / saved.folder).glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        file.write(b"\x00" * 8)
    with pytest.raises(IntegrityError):
        load_generation(tmp_path, into=Weights())
    partial = Weights("moments")
    load_generation(tmp_path, into=partial)
    assert torch.equal(partial.weight, torch.ones(4))
    assert partial.state.keys() == {"weight", "step"}
