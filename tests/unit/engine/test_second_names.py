"""A second name is given to the very bytes of the first, or to a copy of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from torch_ckpt import Checkpointer, load_generation, save_generation

Case = tuple[torch.Tensor, Callable[[], object]]


def _through_data() -> Case:
    tensor = torch.zeros(1000)
    return tensor, lambda: tensor.data.add_(1)


def _through_numpy() -> Case:
    array = np.zeros(1000, dtype=np.float32)
    return torch.from_numpy(array), lambda: array.__iadd__(1)


def _in_inference_mode() -> Case:
    with torch.inference_mode():
        tensor = torch.zeros(1000)

    def change() -> None:
        with torch.inference_mode():
            tensor.add_(1)

    return tensor, change


def _strided_through_data() -> Case:
    tensor = torch.zeros(30, 40).t()
    return tensor, lambda: tensor.data[39, 29].add_(1)


@pytest.mark.parametrize(
    "case", [_through_data, _through_numpy, _in_inference_mode, _strided_through_data]
)
def test_a_change_that_leaves_no_trace_is_saved_under_the_second_name(
    tmp_path: Path, case: Callable[[], Case]
) -> None:
    tensor, change = case()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"t": tensor}, 1, folder="first")
        checkpointer.fence()
        change()
        expected = tensor.clone()
        checkpointer.save({"t": tensor}, 1, folder="second")
    assert torch.equal(load_generation(tmp_path, folder="second")["t"], expected)
    assert not load_generation(tmp_path, folder="first")["t"].any()


def test_the_same_tensors_in_another_order_keep_their_names(tmp_path: Path) -> None:
    left, right = torch.zeros(1000), torch.ones(1000)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"left": left, "right": right}, 1, folder="first")
        checkpointer.save({"right": right, "left": left}, 1, folder="second")
    loaded = load_generation(tmp_path, folder="second")
    assert torch.equal(loaded["left"], left)
    assert torch.equal(loaded["right"], right)


def test_what_another_load_filled_is_saved_again(tmp_path: Path) -> None:
    save_generation(tmp_path / "elsewhere", {"t": torch.full((1000,), 7.0)}, 1)
    tensor = torch.zeros(1000)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save({"t": tensor}, 1, folder="first")
        version = tensor._version
        load_generation(tmp_path / "elsewhere", into={"t": tensor})
        assert tensor._version > version, "autograd has to notice it too"
        checkpointer.save({"t": tensor}, 1, folder="second")
    assert load_generation(tmp_path / "run", folder="second")["t"].eq(7.0).all()


def test_third_names_share_the_bytes_with_the_first(tmp_path: Path) -> None:
    state = {"t": torch.rand(1000)}
    with Checkpointer(tmp_path) as checkpointer:
        for name in ("first", "second", "third"):
            checkpointer.save(state, 1, folder=name)
    assert {p.stat().st_nlink for p in tmp_path.glob("*/*.safetensors")} == {3}
    assert torch.equal(load_generation(tmp_path, folder="third")["t"], state["t"])


def test_a_removed_first_name_does_not_fail_the_second(tmp_path: Path) -> None:
    state = {"t": torch.rand(1000)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, 1, folder="first")
        checkpointer.remove("first")
        checkpointer.save(state, 1, folder="second")
    assert [g.folder for g in checkpointer.generations()] == ["second"]


def test_a_slab_that_grows_between_saves_holds_every_one_of_them(tmp_path: Path) -> None:
    state: dict[str, object] = {}
    kept: dict[str, torch.Tensor] = {}
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        for step in range(6):
            state[f"t{step}"] = kept[f"t{step}"] = torch.rand(300_000 * (step + 1))
            state["text"] = "x" * (1 << (17 + step))
            checkpointer.save(state, step)
    for step in range(6):
        loaded = load_generation(tmp_path, step)
        assert all(torch.equal(loaded[f"t{n}"], kept[f"t{n}"]) for n in range(step + 1))
