"""Every dense tensor comes back as it was; everything else is refused before a byte is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torch_ckpt import (
    Checkpointer,
    StateMismatch,
    UnsupportedState,
    load_generation,
    save_generation,
)
from torch_ckpt.manifest.dtypes import DTYPES
from torch_ckpt.staging.documents import mapping_items

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (5, 3), (2, 3, 4)]


def bits(tensor: torch.Tensor) -> bytes:
    """The very bytes of a tensor's elements in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of random bytes: NaN payloads, denormals and infinities included."""
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    state = {str(i): random_bits(shape, dtype) for i, shape in enumerate(SHAPES)}
    save_generation(tmp_path, state, 1)
    fresh = load_generation(tmp_path)
    into = {key: torch.empty_like(tensor) for key, tensor in state.items()}
    load_generation(tmp_path, into=into)
    for key, tensor in state.items():
        for loaded in (fresh[key], into[key]):
            assert loaded.dtype == dtype
            assert loaded.shape == tensor.shape
            assert bits(loaded) == bits(tensor)


def test_a_full_shard_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {
        name: random_bits((3, 5), getattr(torch, name))
        for name, dtype in DTYPES.items()
        if dtype.safetensors
    }
    generation = save_generation(tmp_path, state, 1)
    (shard,) = Path(generation.url).glob("*.safetensors")
    loaded = safetensors.load_file(shard)
    assert loaded.keys() == state.keys()
    assert all(bits(loaded[name]) == bits(tensor) for name, tensor in state.items())


LAYOUTS = {
    "transposed": lambda: torch.randn(4, 6).t(),
    "strided": lambda: torch.randn(8, 8)[::2, 1::3],
    "view of a large storage": lambda: torch.randn(1000, 1000)[3, :4],
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "needing gradient": lambda: torch.randn(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "inference": lambda: _inference(),  # noqa: PLW0108
    "offset by one": lambda: torch.arange(9, dtype=torch.uint8)[1:],
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back(tmp_path: Path, layout: str) -> None:
    tensor = LAYOUTS[layout]()
    expected = bits(tensor)
    save_generation(tmp_path, {"t": tensor}, 1)
    assert bits(load_generation(tmp_path)["t"]) == expected


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "channels last"])
def test_a_layout_is_filled_in_place(tmp_path: Path, layout: str) -> None:
    saved = LAYOUTS[layout]()
    save_generation(tmp_path, {"t": saved}, 1)
    target = LAYOUTS[layout]()
    pointer, strides = target.data_ptr(), target.stride()
    into = {"t": target}
    load_generation(tmp_path, into=into)
    assert into["t"] is target
    assert (target.data_ptr(), target.stride()) == (pointer, strides)
    assert torch.equal(target, saved)


def test_a_view_is_stored_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    generation = save_generation(tmp_path, {"t": torch.randn(1 << 20)[:4]}, 1)
    assert generation.manifest.bytes < 1 << 16


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    weight = torch.randn(512, 512)
    generation = save_generation(tmp_path, {"emb": weight, "head": {"w": weight}}, 1)
    assert generation.manifest.bytes < 1.1 * weight.nbytes
    loaded = load_generation(tmp_path)
    assert loaded["emb"] is loaded["head"]["w"]
    assert torch.equal(loaded["emb"], weight)


def test_a_tied_module_stays_tied_and_is_filled(tmp_path: Path) -> None:
    def tied() -> Any:
        module = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
        module["b"].weight = module["a"].weight
        return module

    saved, target = tied(), tied()
    save_generation(tmp_path, {"m": saved}, 1)
    load_generation(tmp_path, into={"m": target})
    assert target["a"].weight is target["b"].weight
    assert torch.equal(target["a"].weight, saved["a"].weight)


def test_saved_apart_does_not_load_into_shared_memory(tmp_path: Path) -> None:
    save_generation(tmp_path, {"a": torch.zeros(3), "b": torch.ones(3)}, 1)
    shared = torch.zeros(3)
    with pytest.raises(StateMismatch, match="shares its memory"):
        load_generation(tmp_path, into={"a": shared, "b": shared})


UNSUPPORTED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "a subclass": lambda: torch.zeros(3).as_subclass(_Subclass),
}


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_saved_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, kind: str
) -> None:
    state = {"model": {"layer": [torch.zeros(1), UNSUPPORTED[kind]()]}}
    with pytest.raises(UnsupportedState, match=r"model\.layer\.1"):
        save_generation(tmp_path / "run", state, 1)
    assert not list(tmp_path.rglob("*.*"))


def test_arrays_and_objects_come_back_beside_tensors(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "array": np.arange(12, dtype=np.int16).reshape(3, 4),
        "big": b"x" * 100_000,
        "ints": {1: "a", "1": "b"},
        "pair": (1, 2.5, float("inf")),
        "dtype": torch.bfloat16,
    }
    save_generation(tmp_path, state, 1)
    loaded = load_generation(tmp_path)
    np.testing.assert_array_equal(loaded.pop("array"), state.pop("array"))
    assert loaded == state
    assert [type(key) for key in loaded["ints"]] == [int, str]


def test_names_that_read_alike_stay_apart(tmp_path: Path) -> None:
    state = {
        "a": {"b": torch.zeros(2)},
        "a.b": torch.ones(2),
        0: torch.ones(1),
        "0": torch.zeros(1),
    }
    save_generation(tmp_path, state, 1)
    loaded = load_generation(tmp_path)
    assert torch.equal(loaded["a"]["b"], torch.zeros(2))
    assert torch.equal(loaded["a.b"], torch.ones(2))
    assert torch.equal(loaded[0], torch.ones(1))
    assert torch.equal(loaded["0"], torch.zeros(1))


def test_twenty_thousand_small_tensors_share_blocks(tmp_path: Path) -> None:
    state = {f"t{i}": torch.full((5,), float(i)) for i in range(20_000)}
    generation = save_generation(tmp_path, state, 1)
    assert len(os.listdir(generation.url)) == 3
    loaded = load_generation(tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_a_memory_store_holds_generations_too() -> None:
    with Checkpointer("memory://tensors-test", keep=None) as checkpointer:
        checkpointer.save({"t": torch.arange(5)}, 3)
        checkpointer.wait()


def test_only_dict_documents_have_items() -> None:
    assert mapping_items({"a": 1}) == [("a", 1)]
    assert mapping_items({"$tuple": []}) is None
