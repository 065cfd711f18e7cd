"""What dcp.save puts into a run and what dcp.load takes out of it, in one process."""

from __future__ import annotations

import io
import logging
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from torch_ckpt import (
    Checkpointer,
    ConfigError,
    FormatError,
    GenerationNotFound,
    IntegrityError,
    KeepLast,
    PerRank,
    PickleRefused,
    UnsupportedState,
    load_generation,
)
from torch_ckpt.dcp import Reader, Writer
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.storage.store import open_store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


class Odd:
    """Of no kind that a document holds."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Odd

    __hash__ = None  # type: ignore[assignment]


def save(state: dict[str, Any], root: Path, step: int = 1, **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(root), checkpoint_id=str(step), **options)


def load(state: dict[str, Any], root: Path, **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=Reader(root, **options))
    return state


def failure(action: Any, *args: Any, **options: Any) -> BaseException:
    """What DCP reports of rank 0."""
    with pytest.raises(CheckpointException) as caught:
        action(*args, **options)
    error = caught.value.failures[0][0]
    assert "\n" not in str(error)
    return error


TENSORS = {
    "float32": torch.randn(30, 7),
    "bfloat16": torch.randn(5, 3).bfloat16(),
    "float8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "bool": torch.tensor([True, False]),
    "int64": torch.arange(6).reshape(2, 3),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "strided": torch.randn(6, 8).t()[::2],
    "empty": torch.empty(0, 4),
    "emptier": torch.empty(3, 0, dtype=torch.bfloat16),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    "dotted.name": torch.ones(2),
}


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    kinds = left.dtype == right.dtype and left.shape == right.shape
    one, two = (x.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (left, right))
    return kinds and torch.equal(one, two)


def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path: Path) -> None:
    save({"t": TENSORS}, tmp_path)
    fresh = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in TENSORS.items()}
    load({"t": fresh}, tmp_path)
    loaded = load_generation(tmp_path)["t"]
    for name, tensor in TENSORS.items():
        assert same_bytes(fresh[name], tensor), name
        assert same_bytes(loaded[name], tensor), name


VALUES = {
    "none": None,
    "int": 2**80,
    "text": "step\ud800",
    "tuple": (1, (2.5, None), "x"),
    "tensors in a tuple": (torch.ones(2), 5),
    "set": {1, "a"},
    "bytes": b"\0" * 1000,
    "array": np.arange(7, dtype=np.float32),
    "numpy scalar": np.int16(3),
    "list": [1, [2, (3,)]],
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "$dollar": 1,
    "ordered inside": (OrderedDict(b=1, a=2),),
}


def test_values_come_back_in_type_and_value_without_a_pickle(tmp_path: Path) -> None:
    save({"v": VALUES}, tmp_path)
    loaded = load({"v": dict.fromkeys(VALUES)}, tmp_path)["v"]
    ours = load_generation(tmp_path)["v"]
    for name, value in VALUES.items():
        for back in (loaded[name], ours[name]):
            assert type(back) is type(value), name
            assert name == "set" or str(back) == str(value), name  # a set has no order
            assert name in ("list", "array", "tensors in a tuple") or back == value, name


def test_containers_of_tensors_keep_their_shape_and_keys_become_text_as_dcp_has_it(
    tmp_path: Path,
) -> None:
    state = {
        "state": {0: {"moment": torch.ones(3), "step": 4}},
        "groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": []}],
        "mixed": [torch.zeros(2), 5, None],
    }
    save(state, tmp_path)
    back = load_generation(tmp_path)
    assert back["state"]["0"]["moment"].tolist() == [1, 1, 1]
    assert back["state"]["0"]["step"] == 4
    assert back["groups"] == state["groups"]
    assert back["mixed"][0].tolist() == [0, 0]
    assert back["mixed"][1:] == [5, None]
    live = {"state": {0: {"moment": torch.zeros(3)}}, "groups": [{"lr": 0.0}, {"lr": 0.0}]}
    load(live, tmp_path)
    assert live["state"][0]["moment"].tolist() == [1, 1, 1]
    assert [group["lr"] for group in live["groups"]] == [0.1, 0.2]


def test_a_name_inside_a_value_gives_way_to_a_tensor_of_that_name(tmp_path: Path) -> None:
    save({"a": (torch.ones(2),), "a.0": torch.zeros(3)}, tmp_path)
    back = load({"a": None, "a.0": torch.ones(3)}, tmp_path)
    assert back["a"][0].tolist() == [1, 1]
    assert back["a.0"].tolist() == [0, 0, 0]


def test_an_object_is_pickled_only_if_it_must_be_and_read_only_by_permission(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        save({"job": {"odd": Odd(), "plain": 1, "w": torch.ones(2)}}, tmp_path)
    assert "job.odd" in caplog.text
    untouched = {"job": {"odd": None, "w": torch.zeros(2)}}
    error = failure(load, untouched, tmp_path)
    assert isinstance(error, PickleRefused)
    assert "job.odd" in str(error)
    assert untouched["job"]["w"].tolist() == [0, 0]
    assert load({"job": {"plain": None}}, tmp_path)["job"]["plain"] == 1
    assert load({"job": {"odd": None}}, tmp_path, allow_pickle=True)["job"]["odd"] == Odd()


class SpelledOut(DefaultSavePlanner):
    """Writes values in a form of its own."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(repr(object).encode())
        return super().transform_object(write_item, object)


class ReadOut(DefaultLoadPlanner):
    """Reads them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read().decode()


def test_bytes_of_a_planner_of_ones_own_go_to_such_a_planner_by_permission(
    tmp_path: Path,
) -> None:
    save({"a": [1, 2], "t": torch.ones(2)}, tmp_path, planner=SpelledOut())
    state: dict[str, Any] = {"a": None}
    error = failure(dcp.load, state, storage_reader=Reader(tmp_path), planner=ReadOut())
    assert isinstance(error, PickleRefused)
    assert "a" in str(error)
    reader = Reader(tmp_path, allow_pickle=True)
    dcp.load(state, storage_reader=reader, planner=ReadOut())
    assert state["a"] == "[1, 2]"


class Halved(DefaultSavePlanner):
    """Saves tensors in another dtype than it planned."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object.half() if isinstance(object, torch.Tensor) else object


def test_a_planner_that_breaks_its_word_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    error = failure(save, {"layer": torch.ones(3)}, tmp_path, planner=Halved())
    assert isinstance(error, UnsupportedState)
    assert "'layer' is float16" in str(error).replace("state['layer']", "'layer'")
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        ((lambda: 0), "pickle refuses"),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_nothing(
    tmp_path: Path, value: object, said: str
) -> None:
    error = failure(save, {"x": {"y": value, "w": torch.ones(9)}}, tmp_path)
    assert isinstance(error, UnsupportedState)
    assert "x.y" in str(error)
    assert said in str(error)
    assert not list(tmp_path.rglob("*.json"))


def test_a_tensor_of_another_dtype_and_layout_is_filled_by_value(tmp_path: Path) -> None:
    saved = torch.randn(40, 6)
    save({"w": saved}, tmp_path)
    turned = torch.zeros(6, 40, dtype=torch.float64).t()
    load({"w": turned}, tmp_path)
    assert torch.equal(turned, saved.double())


def test_a_parameter_that_is_filled_counts_as_changed(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    parameter = torch.nn.Parameter(torch.zeros(3))
    version = parameter._version
    load({"w": parameter}, tmp_path)
    assert parameter.tolist() == [1, 1, 1]
    assert parameter._version > version


def test_what_a_checkpointer_saved_is_read_by_dcp(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tied = torch.ones(4)
    with Checkpointer(tmp_path) as checkpointer:
        state = {"model": model, "optim": optimizer, "tied": [tied, tied], "mine": PerRank(5)}
        checkpointer.save(state, 3)
    live = {
        "model": {name: torch.zeros_like(t) for name, t in model.state_dict().items()},
        "optim": {"state": {0: {"exp_avg": torch.zeros(2, 3)}}, "param_groups": [{"lr": 0.0}]},
        "tied": [torch.zeros(4), torch.zeros(4)],
        "mine": None,
    }
    load(live, tmp_path)
    assert torch.equal(live["model"]["weight"], model.weight)
    moment = optimizer.state[model.weight]["exp_avg"]
    assert torch.equal(live["optim"]["state"][0]["exp_avg"], moment)
    assert live["optim"]["param_groups"][0]["lr"] == 1e-3
    assert [tensor.tolist() for tensor in live["tied"]] == [[1] * 4] * 2
    assert live["mine"] == 5


def test_what_dcp_saved_is_resumed_by_a_checkpointer_and_continued(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    save({"model": model.state_dict(), "step": 4}, tmp_path, 4)
    fresh = torch.nn.Linear(3, 2)
    state = {"model": fresh, "step": 0}
    with Checkpointer(tmp_path) as checkpointer:
        generation = checkpointer.resume(state)
        assert generation is not None
        assert (generation.step, state["step"]) == (4, 4)
        assert torch.equal(fresh.weight, model.weight)
        checkpointer.save(state, 5)
    save({"model": model.state_dict(), "step": 6}, tmp_path, 6)
    newest, middle, oldest = Catalog(open_store(tmp_path)).committed()
    assert newest.manifest.run == middle.manifest.run == oldest.manifest.run
    assert newest.manifest.parent == {"step": 5, "attempt": middle.manifest.attempt}


def test_a_second_save_of_a_step_replaces_the_first_and_leaves_no_litter(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        save({"w": torch.full((4,), value)}, tmp_path, 7)
    assert load_generation(tmp_path)["w"].tolist() == [2.0] * 4
    names = sorted(path.name.partition(".")[2] for path in tmp_path.glob("step-*/rank*"))
    assert len({name.partition(".")[0] for name in names}) == 1


def test_old_generations_go_by_the_rule_of_the_writer(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep=KeepLast(2))
    for step in (1, 2, 3):
        dcp.save({"step": step}, storage_writer=writer, checkpoint_id=f"step-{step}")
    assert [one.step for one in Catalog(open_store(tmp_path)).committed()] == [3, 2]
    assert load({"step": 0}, tmp_path)["step"] == 3


def test_the_id_chooses_the_generation(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"at": step}, storage_writer=Writer(tmp_path), checkpoint_id=f"step-{step}")
    for checkpoint_id, at in [("1", 1), (f"{tmp_path}/step-1", 1), ("step-2", 2), (None, 2)]:
        state = {"at": 0}
        dcp.load(state, storage_reader=Reader(tmp_path), checkpoint_id=checkpoint_id)
        assert state["at"] == at


def test_a_missing_generation_and_a_wrong_id_are_said(tmp_path: Path) -> None:
    save({"a": 1}, tmp_path, 5)
    reader = Reader(tmp_path)
    error = failure(dcp.load, {"a": 0}, storage_reader=reader, checkpoint_id="6")
    assert isinstance(error, GenerationNotFound)
    assert "step 6" in str(error)
    assert "there is step 5" in str(error)
    for checkpoint_id in ("best", "/elsewhere/step-5", None):
        writer = Writer(tmp_path)
        error = failure(dcp.save, {"a": 1}, storage_writer=writer, checkpoint_id=checkpoint_id)
        assert isinstance(error, ConfigError)


def test_a_writer_is_not_left_with_the_id_of_the_save_before(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    dcp.save({"a": 1}, storage_writer=writer, checkpoint_id="1")
    assert isinstance(failure(dcp.save, {"a": 2}, storage_writer=writer), ConfigError)
    assert load_generation(tmp_path)["a"] == 1


class SendsOnce(DefaultSavePlanner):
    """Of a name of its own, since DCP keeps plans by the name of the planner's class."""


def test_plans_that_a_planner_keeps_back_are_refused(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path, 1, planner=SendsOnce(enable_plan_caching=True))
    again = SendsOnce(enable_plan_caching=True)
    error = failure(save, {"w": torch.ones(2)}, tmp_path, 2, planner=again)
    assert isinstance(error, ConfigError)
    assert "enable_plan_caching" in str(error)
    assert [one.step for one in Catalog(open_store(tmp_path)).committed()] == [1]


def test_damage_is_named_and_reaches_no_tensor(tmp_path: Path) -> None:
    save({"good": torch.ones(1 << 20), "bad": torch.ones(1 << 20)}, tmp_path)
    (shard,) = tmp_path.glob("step-*/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 0x10
    shard.write_bytes(data)
    live = {"bad": torch.zeros(1 << 20)}
    error = failure(load, live, tmp_path)
    assert isinstance(error, IntegrityError)
    assert shard.name in str(error)
    assert error.tensors == ["bad"]
    assert not live["bad"].any()
    assert load({"good": torch.zeros(1 << 20)}, tmp_path)["good"].all()


@pytest.mark.parametrize("pattern", ["rank*.json", "rank*.safetensors"])
def test_a_file_that_is_gone_is_named(tmp_path: Path, pattern: str) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    (gone,) = tmp_path.glob(f"step-*/{pattern}")
    gone.unlink()
    error = failure(load, {"w": torch.zeros(3)}, tmp_path)
    assert isinstance(error, FormatError)
    assert gone.name in str(error)


def test_a_writer_and_a_reader_reach_other_processes(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(Writer(tmp_path, keep=KeepLast(3))))
    dcp.save({"a": 1}, storage_writer=writer, checkpoint_id="1")
    reader = pickle.loads(pickle.dumps(Reader(tmp_path)))
    state = {"a": 0}
    dcp.load(state, storage_reader=reader)
    assert state["a"] == 1


def test_dcp_s_own_tools_rebuild_a_state_from_its_keys_alone(tmp_path: Path) -> None:
    save({"m": {"w": torch.ones(2), "l": [torch.zeros(1)]}, "step": 3}, tmp_path)
    state = _load_state_dict_from_keys(storage_reader=Reader(tmp_path))
    assert state["m"]["w"].tolist() == [1, 1]
    assert state["m"]["l"][0].tolist() == [0]
    assert state["step"] == 3


def test_a_save_without_a_coordinator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use_collectives"):
        save({"a": 1}, tmp_path, use_collectives=False)
