"""Small tensors share blocks, but only with those of the same rule: each is stored as asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests import chains
from tests.chains import assert_sound
from torch_ckpt import Checkpointer, load_generation

SMALL = 40
"""Layers whose tensors all fit into one block."""


def small_adam() -> dict[str, Any]:
    """Weights and moments by turns, as an optimizer's state has them."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {str(n): torch.randn(500, generator=generator) for n in range(SMALL)},
        "optimizer": {
            str(n): {
                "step": torch.tensor(7.0),
                "exp_avg": torch.randn(500, generator=generator) * 1e-3,
                "exp_avg_sq": torch.rand(500, generator=generator) * 1e-6,
            }
            for n in range(SMALL)
        },
    }


def trained(state: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    for weights in state["model"].values():
        weights += 1e-3 * torch.randn(weights.shape, generator=generator)
    for moments in state["optimizer"].values():
        moments["step"] += 1
        moments["exp_avg"] += 1e-4 * torch.randn(500, generator=generator)
        moments["exp_avg_sq"] *= 1.01


def test_each_rule_is_kept_for_tensors_too_small_for_blocks_of_their_own(tmp_path: Path) -> None:
    state = small_adam()
    options: dict[str, Any] = {"moments": "fp8", "lossy_delta": {"model.*": 0.05}}
    with Checkpointer(tmp_path, incremental=True, keep=None, **options) as checkpointer:
        for step in (1, 2, 3):
            trained(state)
            checkpointer.save(state, step).wait()
    newest = chains.by_step(tmp_path)[3]
    assert {"fp8", "fp8-sqrt", "lossy-delta"} <= set(chains.codecs(tmp_path, newest))
    assert newest.manifest.bytes < chains.by_step(tmp_path)[1].manifest.bytes / 3
    found = load_generation(tmp_path, 3)
    for name, moments in state["optimizer"].items():
        assert torch.equal(found["optimizer"][name]["step"], moments["step"])
        torch.testing.assert_close(
            found["optimizer"][name]["exp_avg"], moments["exp_avg"], rtol=2**-4, atol=1e-6
        )
    assert_sound(tmp_path)


def test_without_rules_small_tensors_share_one_block(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, incremental=True) as checkpointer:
        checkpointer.save(small_adam(), 1).wait()
    assert len(chains.part(tmp_path, chains.by_step(tmp_path)[1]).blocks) == 1
