"""What is loaded is the state at the moment of the save, whatever training does afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torch_ckpt import Checkpointer, load_generation
from torch_ckpt.errors import SnapshotTorn


class Net(nn.Module):
    """Parameters, buffers that change in forward, and one that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
        self.register_buffer("ema", torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def training() -> tuple[Net, torch.optim.Optimizer, dict[str, Any]]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 32)).sum().backward()
    optimizer.step()
    extra = {
        "array": np.arange(100, dtype=np.float64),
        "strided": np.arange(100).reshape(10, 10)[:, ::3],
        "half": torch.randn(40).to(torch.bfloat16),
        "view": torch.randn(20, 20).T[3:7],
        "list": [torch.ones(3), {"deep": torch.zeros(2)}],
        "queue": deque([1, 2, 3]),
        "plain": {"a": [1, 2]},
    }
    return model, optimizer, {"model": model, "optimizer": optimizer, "extra": extra}


def frozen(value: Any) -> Any:
    """A deep copy that shares nothing."""
    if hasattr(value, "state_dict"):
        return frozen(value.state_dict())
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return type(value)(frozen(item) for item in value)
    return value


def assert_same(found: Any, wanted: Any, path: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), path
        assert found.dtype == wanted.dtype, path
    elif isinstance(wanted, np.ndarray):
        assert np.array_equal(found, wanted), path
        assert found.dtype == wanted.dtype, path
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), path
        for key, item in wanted.items():
            assert_same(found[key], item, f"{path}.{key}")
    elif isinstance(wanted, (list, tuple, deque)):
        assert len(found) == len(wanted), path
        for index, item in enumerate(wanted):
            assert_same(found[index], item, f"{path}.{index}")
    else:
        assert found == wanted, path


def ruin_what_is_not_the_optimizers(model: Net, state: dict[str, Any]) -> None:
    """Change every buffer, array, loose tensor and plain value in place."""
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_().add_(7)
        extra = state["extra"]
        for tensor in (extra["half"], extra["view"], extra["list"][0], extra["list"][1]["deep"]):
            tensor.add_(1)
    extra["array"][:] = -1
    extra["strided"][:] = -1
    extra["queue"].append(4)
    extra["plain"]["a"].append(3)
    extra["list"].append("more")


def ruin_what_the_optimizer_owns(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """Change every parameter and every tensor of the optimizer's state in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3)
        for state in optimizer.state.values():
            for value in state.values():
                value.fill_(5)
    optimizer.param_groups[0]["lr"] = 123.0


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path, keep=None, distributed=False) as saver:
        yield saver


def test_everything_outside_the_optimizer_may_change_once_save_has_returned(
    saver: Checkpointer, tmp_path: Path
) -> None:
    model, optimizer, state = training()
    wanted = frozen(state)
    pending = saver.save(state, 1)
    ruin_what_is_not_the_optimizers(model, state)
    saver.fence()
    ruin_what_the_optimizer_owns(model, optimizer)
    pending.wait()
    assert_same(load_generation(tmp_path), wanted)


@pytest.mark.parametrize("block", ["staged", "committed"])
def test_everything_may_change_once_a_staged_save_has_returned(
    saver: Checkpointer, tmp_path: Path, block: Any
) -> None:
    model, optimizer, state = training()
    wanted = frozen(state)
    pending = saver.save(state, 1, block=block)
    ruin_what_is_not_the_optimizers(model, state)
    ruin_what_the_optimizer_owns(model, optimizer)
    pending.wait()
    assert_same(load_generation(tmp_path), wanted)


def test_training_on_with_the_next_step_of_the_optimizer_as_the_fence(
    saver: Checkpointer, tmp_path: Path
) -> None:
    model, optimizer, state = training()
    for step in range(1, 6):
        wanted = frozen(state)
        pending = saver.save(state, step)
        optimizer.zero_grad()
        model(torch.randn(16, 32)).square().sum().backward()  # changes BatchNorm's buffers
        optimizer.step()
        pending.wait()
        assert_same(load_generation(tmp_path, step), wanted)


def test_a_parameter_that_changes_before_the_fence_is_named_and_nothing_is_committed(
    saver: Checkpointer, tmp_path: Path
) -> None:
    model, optimizer, state = training()
    saver.save(state, 1, block="committed")
    pending = saver.save(state | {"more": 1}, 2)
    with torch.no_grad():
        model.get_parameter("layers.2.weight").add_(1)
    saver.fence()
    with pytest.raises(SnapshotTorn, match=r"model\.layers\.2\.weight") as caught:
        pending.wait()
    assert caught.value.tensors == ["model.layers.2.weight"]
    with pytest.raises(SnapshotTorn):
        saver.wait()  # raised once
    saver.wait()
    assert [one.step for one in saver.generations()] == [1]
    optimizer.step()  # training goes on
    wanted = frozen(state)
    saver.save(state, 3, block="committed")
    assert_same(load_generation(tmp_path), wanted)
    assert [one.step for one in saver.generations()] == [3, 1]


def test_a_state_of_the_optimizer_that_changes_before_the_fence_is_named_too(
    saver: Checkpointer,
) -> None:
    _, optimizer, state = training()
    pending = saver.save(state, 1)
    first = next(iter(optimizer.state.values()))
    with torch.no_grad():
        first["exp_avg"].mul_(2)
    with pytest.raises(SnapshotTorn, match="exp_avg"):
        pending.wait()
    with pytest.raises(SnapshotTorn):
        saver.wait()
    assert saver.generations() == []
