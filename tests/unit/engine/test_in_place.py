"""Loading fills the given structure and says what does not fit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt import (
    Checkpointer,
    GenerationNotFound,
    PerRank,
    PickleRefused,
    RngState,
    StateMismatch,
    load_generation,
    save_generation,
)


class Counter:
    """Anything with state_dict and load_state_dict."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def trained(seed: int, steps: int) -> dict[str, Any]:
    """A model with its optimizer and scheduler after some steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    for _ in range(steps):
        train_step(state)
    return state


def train_step(state: dict[str, Any]) -> float:
    state["optimizer"].zero_grad()
    loss = state["model"](torch.randn(16, 4)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()
    state["step"] += 1
    return loss.item()


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    state = {**trained(0, 3), "rng": PerRank(RngState())}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, 3, block="staged")
    expected = [train_step(state) for _ in range(3)]
    again = {**trained(1, 0), "rng": PerRank(RngState())}
    with Checkpointer(tmp_path) as checkpointer:
        generation = checkpointer.resume(again)
        assert generation is not None
        assert generation.step == again["step"] == 3
        assert [train_step(again) for _ in range(3)] == expected


def test_tensors_keep_their_storage_and_containers_their_identity(tmp_path: Path) -> None:
    save_generation(tmp_path, {"a": torch.ones(3), "nest": {"b": [torch.ones(2), 7]}}, 1)
    nest: dict[str, Any] = {"b": [torch.zeros(2), 0]}
    into = {"a": torch.zeros(3), "nest": nest}
    pointer, items = into["a"].data_ptr(), nest["b"]
    load_generation(tmp_path, into=into)
    assert into["a"].data_ptr() == pointer
    assert into["nest"] is nest
    assert nest["b"] is items
    assert torch.equal(into["a"], torch.ones(3))
    assert items[1] == 7


def test_moments_of_an_optimizer_keep_their_storage(tmp_path: Path) -> None:
    save_generation(tmp_path, trained(0, 2), 2)
    into = trained(1, 2)
    parameter = next(into["model"].parameters())
    pointer = into["optimizer"].state[parameter]["exp_avg"].data_ptr()
    load_generation(tmp_path, into=into)
    assert into["optimizer"].state[parameter]["exp_avg"].data_ptr() == pointer


def test_plain_leaves_and_whole_subtrees_are_replaced(tmp_path: Path) -> None:
    saved = {"n": 5, "log": {"losses": [1.0, 2.0]}, "pair": (1, "x"), "c": Counter(4)}
    save_generation(tmp_path, saved, 1)
    into: dict[str, Any] = {"n": 0, "log": {}, "pair": None, "c": Counter()}
    counter = into["c"]
    load_generation(tmp_path, into=into)
    assert into["c"] is counter
    assert counter.count == 4
    assert {k: into[k] for k in ("n", "log", "pair")} == {k: saved[k] for k in ("n", "log", "pair")}


def test_missing_surplus_and_misshaped_keys_are_all_listed(tmp_path: Path) -> None:
    save_generation(tmp_path, {"a": torch.zeros(3), "gone": torch.zeros(1), "x": 1}, 1)
    into = {"a": torch.zeros(4), "new": torch.zeros(1), "x": 0}
    with pytest.raises(StateMismatch) as caught:
        load_generation(tmp_path, into=into)
    assert caught.value.missing == ["new"]
    assert caught.value.surplus == ["gone"]
    assert caught.value.misshaped == ["a (saved float32[3], given float32[4])"]
    assert into["x"] == 0, "nothing is touched by a load that is refused"


def test_a_module_that_does_not_fit_is_refused_untouched(tmp_path: Path) -> None:
    save_generation(tmp_path, {"m": torch.nn.Linear(3, 2)}, 1)
    target = torch.nn.Linear(4, 2, bias=False)
    before = target.weight.detach().clone()
    with pytest.raises(StateMismatch) as caught:
        load_generation(tmp_path, into={"m": target})
    assert caught.value.surplus == ["m.bias"]
    assert "m.weight" in caught.value.misshaped[0]
    assert torch.equal(target.weight, before)


def test_a_lenient_load_takes_what_fits(tmp_path: Path) -> None:
    save_generation(
        tmp_path, {"a": torch.ones(3), "gone": 1, "m": torch.nn.Linear(3, 2), "b": torch.ones(2)}, 1
    )
    target = torch.nn.Linear(4, 2)
    into = {"a": torch.zeros(3), "new": 5, "m": target, "b": torch.zeros(5)}
    load_generation(tmp_path, into=into, strict=False)
    assert torch.equal(into["a"], torch.ones(3))
    assert torch.equal(into["b"], torch.zeros(5))
    assert into["new"] == 5
    assert target.weight.shape == (2, 4)


def test_a_bare_module_can_be_the_whole_state(tmp_path: Path) -> None:
    saved, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save_generation(tmp_path, saved, 1)
    load_generation(tmp_path, into=target)
    assert torch.equal(saved.weight, target.weight)


def test_a_pickled_value_needs_permission(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        save_generation(tmp_path, {"odd": [1, Odd("x")], "t": torch.ones(1)}, 1)
    assert "odd.1 is a" in caplog.text
    with pytest.raises(PickleRefused, match=r"odd\.1 \(.*Odd\)"):
        load_generation(tmp_path)
    assert load_generation(tmp_path, allow_pickle=True)["odd"][1].name == "x"


class Odd:
    """A class that no typed document knows."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_a_step_that_is_not_there_is_named_with_its_neighbours(tmp_path: Path) -> None:
    save_generation(tmp_path, {"a": 1}, 7)
    with pytest.raises(GenerationNotFound, match=r"step 8.*step 7"):
        load_generation(tmp_path, 8)


def test_an_empty_root_loads_nothing_and_resumes_nothing(tmp_path: Path) -> None:
    with pytest.raises(GenerationNotFound, match="nothing is committed there"):
        load_generation(tmp_path)
    with Checkpointer(tmp_path / "new") as checkpointer:
        assert checkpointer.resume({"a": 1}) is None
        assert checkpointer.latest() is None
