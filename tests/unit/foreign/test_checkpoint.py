"""A foreign checkpoint is read back bit for bit, or refused in one line; nothing in it runs."""

from __future__ import annotations

import argparse
import collections
import os
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.foreign.samples import Bomb, edit, same, save_dcp, training_state
from torch_ckpt import CkptError, FormatError, PickleRefused
from torch_ckpt.foreign.checkpoint import find_step, read_checkpoint


def save_file(state: Any, path: Path, **options: Any) -> Path:
    torch.save(state, path, **options)
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(FormatError) as caught:
        read_checkpoint(path, **options)
    return str(caught.value)


# ── folders of DCP ────────────────────────────────────────────────────────────────────────────


def test_a_folder_of_one_process_is_the_state_that_was_saved(tmp_path: Path) -> None:
    state = training_state()
    found = read_checkpoint(save_dcp(state, tmp_path / "source"))
    assert found.kind == "dcp"
    assert same(found.state, state), "also the numbers under which an optimizer keeps its state"


def test_an_optimizer_whose_state_has_names_keeps_them(tmp_path: Path) -> None:
    slot = {"exp_avg": torch.ones(2)}
    state = {"optimizer": {"state": {"0": slot}, "param_groups": [{"lr": 0.1, "params": ["0"]}]}}
    assert same(read_checkpoint(save_dcp(state, tmp_path / "source")).state, state)


def test_an_item_that_is_no_data_never_runs_and_is_named(tmp_path: Path) -> None:
    source = save_dcp({"good": 1, "bad": Bomb(tmp_path / "ran")}, tmp_path / "source")

    with pytest.raises(PickleRefused) as caught:
        read_checkpoint(source)

    assert caught.value.values == ["bad (posix.mkdir)"]
    assert not (tmp_path / "ran").exists()
    assert read_checkpoint(source, allow_pickle=True).state["good"] == 1
    assert (tmp_path / "ran").is_dir(), "which shows that it would have run"


def test_a_tensor_that_is_no_tensor_never_runs_even_where_pickle_is_allowed(
    tmp_path: Path,
) -> None:
    source = save_dcp({"w": torch.ones(2), "bad": Bomb(tmp_path / "ran")}, tmp_path / "source")

    def change(metadata: Any) -> None:
        places = {index.fqn: info for index, info in metadata.storage_data.items()}
        places["w"].__dict__.update(places["bad"].__dict__)
        del metadata.state_dict_metadata["bad"]

    edit(source, change)
    assert "posix.mkdir where a tensor should be" in refusal(source, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_tensors_that_changed_places_are_refused(tmp_path: Path) -> None:
    source = save_dcp({"a": torch.ones(2), "b": torch.ones(2).half()}, tmp_path / "source")

    def change(metadata: Any) -> None:
        one, other = metadata.storage_data.values()
        one.offset, other.offset = other.offset, one.offset

    edit(source, change)
    assert "holds something else than" in refusal(source)


def test_one_changed_bit_of_a_tensor_is_found(tmp_path: Path) -> None:
    source = save_dcp({"w": torch.full((1000,), 7.0)}, tmp_path / "source")
    (file,) = source.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(np.full(8, 7, "<f4").tobytes()) + 400] ^= 1
    file.write_bytes(data)
    assert "Bad CRC-32" in refusal(source)


def test_what_lightning_writes_beside_a_folder_comes_with_it(tmp_path: Path) -> None:
    parts = {"model": {"w": torch.ones(2)}, **{f"optimizer_{i}": {"n": i} for i in range(11)}}
    source = save_dcp(parts, tmp_path / "source.ckpt")
    torch.save({"global_step": 3, "pytorch-lightning_version": "2.6"}, source / "meta.pt")

    found = read_checkpoint(source)

    assert found.kind == "lightning"
    assert found.framework == {"lightning": "2.6"}
    assert same(
        found.state,
        {
            "global_step": 3,
            "pytorch-lightning_version": "2.6",
            "state_dict": {"w": torch.ones(2)},
            "optimizer_states": [{"n": i} for i in range(11)],
        },
    )


# ── files of torch.save ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_is_the_state_that_was_saved(tmp_path: Path, zipped: bool) -> None:
    state = training_state()
    if not zipped:
        del state["small"]  # torch itself cannot read these in its old format
    path = save_file(state, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    found = read_checkpoint(path)
    assert found.kind == "torch"
    assert same(found.state, state)


def test_classes_that_are_only_data_need_no_permission(tmp_path: Path) -> None:
    arrays = {
        "rng": np.random.RandomState(0).get_state(),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "turned": np.arange(3, dtype=">i4"),
        "words": np.array(["a", "bcd"]),
        "none": np.empty((0, 4)),
        "scalar": np.array(7),
    }
    state = {
        **arrays,
        "rate": np.float32(0.5),
        "kind": np.dtype("<f4"),
        "path": Path("/data/x"),
        "args": argparse.Namespace(lr=np.float64(0.1), layers=[1, 2]),
        "bytes": [b"", b"abc"],
        "counts": {np.int64(3): {np.int64(4)}},
    }
    found = read_checkpoint(save_file(state, tmp_path / "x.pt")).state
    assert list(found) == list(state)
    for name in arrays:
        one, other = (state[name], found[name])
        one, other = (one[1], other[1]) if name == "rng" else (one, other)
        assert (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())
        assert other.flags.writeable
    for name in state.keys() - arrays.keys():
        assert found[name] == state[name]
        assert type(found[name]) is type(state[name])


class Array:
    """Pickles as an array of numpy's that says of itself what it is told."""

    def __init__(self, dtype: Any, state: Any, shape: Any = (1,)) -> None:
        self.parts = dtype, state, shape

    def __reduce__(self) -> tuple[Any, ...]:
        dtype, data, shape = self.parts
        call: Any = np.empty(0).__reduce__()[0]
        return call, (np.ndarray, (0,), b"b"), (1, shape, dtype, False, data)


class Dtype:
    """Pickles as a dtype that was changed."""

    def __init__(self, text: str, state: Any) -> None:
        self.text, self.state = text, state

    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, (self.text, False, True), self.state


@pytest.mark.parametrize(
    ("array", "words"),
    [
        # bytes that numpy would take for the address of an object
        (Array(Dtype("O8", (3, "|", None, None, None, -1, -1, 0)), b"\x01" * 8), "is object"),
        (Array(Dtype("V8", (3, "|", None, ("x",), {"x": 0}, 8, 1, 0)), b"1" * 8), "dtype is |V8"),
        (Array(Dtype("O8", None), [{}]), "is object"),
        (Array(np.dtype("f8"), b"1" * 8, (1 << 40,)), "8 bytes for float64"),
        (Array(np.dtype("f8"), b"1" * 8, (-1,)), "is no shape"),
        (Array(np.dtype("f8"), b"1" * 7), "7 bytes for float64"),
        (Array(np.dtype("f8"), [1.0]), "elements are objects"),
        (Array("f8", b"1" * 8), "no dtype"),
    ],
)
def test_an_array_that_numpy_should_not_believe_is_refused(
    tmp_path: Path, array: Any, words: str
) -> None:
    path = save_file({"a": array, "step": 1}, tmp_path / "x.pt")
    with pytest.raises(PickleRefused, match=re.escape(words)):
        read_checkpoint(path)


def test_arrays_of_structures_need_permission(tmp_path: Path) -> None:
    table = np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])
    path = save_file({"table": table}, tmp_path / "x.pt")
    with pytest.raises(PickleRefused, match=r"numpy\.ndarray"):
        read_checkpoint(path)
    assert read_checkpoint(path, allow_pickle=True).state["table"].tolist() == [(1, 2.5)]


def test_every_class_that_is_refused_is_named(tmp_path: Path) -> None:
    state = {"seen": collections.defaultdict(int, a=1), "last": collections.deque([1])}
    with pytest.raises(PickleRefused) as caught:
        read_checkpoint(save_file(state, tmp_path / "x.pt"))
    assert caught.value.values == ["collections.defaultdict", "collections.deque"]
    assert read_checkpoint(tmp_path / "x.pt", allow_pickle=True).state == state


@pytest.mark.parametrize("zipped", [True, False])
def test_an_object_in_a_file_never_runs_and_is_named(tmp_path: Path, zipped: bool) -> None:
    state = {"w": torch.ones(2), "bad": Bomb(tmp_path / "ran")}
    path = save_file(state, tmp_path / "x.ckpt", _use_new_zipfile_serialization=zipped)

    with pytest.raises(PickleRefused, match=r"posix\.mkdir"):
        read_checkpoint(path)

    assert not (tmp_path / "ran").exists()
    assert torch.equal(read_checkpoint(path, allow_pickle=True).state["w"], torch.ones(2))
    assert (tmp_path / "ran").is_dir(), "which shows that it would have run"


def test_a_file_cut_short_anywhere_is_one_line(tmp_path: Path) -> None:
    path = save_file(training_state(), tmp_path / "x.pt")
    data = path.read_bytes()
    for length in range(0, len(data), max(1, len(data) // 40)):
        path.write_bytes(data[:length])
        assert "\n" not in refusal(path)


def test_changed_bytes_of_a_file_do_nothing_worse_than_a_refusal(tmp_path: Path) -> None:
    path = save_file({"w": torch.ones(50), "step": 1}, tmp_path / "x.pt")
    data = path.read_bytes()
    chance = random.Random(0)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(changed)
        try:
            found = read_checkpoint(path).state
        except CkptError:
            continue
        assert torch.equal(found["w"], torch.ones(50))


def test_tensors_without_bytes_of_their_own_cannot_exhaust_memory(tmp_path: Path) -> None:
    path = save_file({"huge": torch.zeros(1).expand(1 << 40)}, tmp_path / "x.pt")
    assert "are stored" in refusal(path)


def test_an_archive_that_would_grow_is_refused(tmp_path: Path) -> None:
    path = save_file({"w": torch.zeros(1 << 16)}, tmp_path / "x.pt")
    with zipfile.ZipFile(path) as stored:
        members = {info.filename: stored.read(info) for info in stored.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in members.items():
            packed.writestr(name, data)
    assert "is compressed" in refusal(path)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_program_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    assert "TorchScript" in refusal(path)
    assert "TorchScript" in refusal(path, allow_pickle=True)


def test_a_state_inside_itself_is_refused(tmp_path: Path) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert "nested too deeply" in refusal(save_file(loop, tmp_path / "x.pt"))


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_an_error_of_the_system(tmp_path: Path) -> None:
    path = save_file({}, tmp_path / "x.pt")
    path.chmod(0)
    with pytest.raises(PermissionError):
        read_checkpoint(path)


# ── the step ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("state", "name", "step"),
    [
        ({"global_step": 7, "step": 8}, "epoch=1-step=9.ckpt", 7),
        ({"step": 8}, "step-9", 8),
        ({"train_state": {"step": torch.tensor(12)}}, "x", 12),
        ({"iteration": torch.tensor([5])}, "x", 5),
        ({"step": -1, "train_state": 3}, "step-500", 500),
        ({"step": torch.tensor(1.5)}, "iter_0000500", 500),
        ({}, "epoch=3-step=700.ckpt", 700),
        ({}, "epoch=3-step=700-v1.ckpt", 700),
        ({}, "checkpoint_1000.pt", 1000),
        ([1], "7", 7),
        ({}, "epoch=3-val_loss=0.25.ckpt", None),
        ({}, "model-v2.pt", None),
        ({}, "last.ckpt", None),
        ({}, "9" * 30, None),
    ],
)
def test_the_step_is_the_one_in_the_state_or_at_the_end_of_the_name(
    state: Any, name: str, step: int | None
) -> None:
    assert find_step(state, Path(name)) == step
