"""Flat keys into a nested document, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_ckpt import FormatError, UnsupportedState
from torch_ckpt.dcp.nesting import keys_of, tree_of


def _metadata(paths: dict[str, Any], tensors: tuple[str, ...] = ()) -> Metadata:
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([1]), [])
    kinds: Any = {key: tensor if key in tensors else BytesStorageMetadata() for key in paths}
    return Metadata(kinds, planner_data=paths)


def test_paths_become_dicts_and_lists() -> None:
    paths = {"a.b": ("a", "b"), "a.l.0": ("a", "l", 0), "a.l.1.x": ("a", "l", 1, "x")}
    tree = tree_of(_metadata(paths, ("a.b",)), {"a.l.0": None, "a.l.1.x": 5})
    assert tree == {"a": {"b": {"$tensor": "a.b"}, "l": [None, {"x": 5}]}}
    assert {key: found.path for key, found in keys_of(tree, where="here").items()} == paths


def test_keys_that_json_cannot_hold_as_they_are_come_back() -> None:
    paths = {"$x": ("$x",), "\ud800": ("\ud800",)}
    tree = tree_of(_metadata(paths), {"$x": 1, "\ud800": 2})
    assert {key: found.path for key, found in keys_of(tree, where="here").items()} == paths


def test_without_planner_data_keys_are_taken_whole() -> None:
    metadata = _metadata({"a.b": None})
    metadata.planner_data = None
    assert tree_of(metadata, {"a.b": 1}) == {"a.b": 1}


def test_places_that_no_rank_fills_are_none() -> None:
    assert tree_of(_metadata({"l.2": ("l", 2)}), {"l.2": 1}) == {"l": [None, None, 1]}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("value", [5, None])
def test_a_value_on_one_rank_and_a_container_on_another_is_refused(
    order: int, value: object
) -> None:
    paths = dict([("a", ("a",)), ("a.b", ("a", "b"))][::order])
    with pytest.raises(UnsupportedState, match="keys of their own"):
        tree_of(_metadata(paths), {"a": value, "a.b": 1})


def test_lists_and_tuples_are_taken_apart_where_dcp_does_so() -> None:
    tree = {
        "plain": [1, [2, 3], {"$tuple": [4]}],
        "tensors": [{"$tensor": "t"}, 5],
        "nested": [[{"a": 1}]],
        "tuple": {"$tuple": [{"$tensor": "u"}]},
        "numbers": {"$dict": [[0, {"$tensor": "n"}], [1, 2]]},
    }
    found = keys_of(tree, where="here")
    assert list(found) == [
        "plain",
        "tensors.0",
        "tensors.1",
        "nested.0.0.a",
        "tuple",
        "numbers.0",
        "numbers.1",
    ]
    assert [key for key, one in found.items() if one.tensor] == ["tensors.0", "numbers.0"]


def test_two_values_of_one_key_are_refused_by_name() -> None:
    with pytest.raises(FormatError, match=r"two values as 'a\.b'"):
        keys_of({"a": {"b": 1}, "a.b": 2}, where="here")


def test_a_state_that_is_no_dict_is_refused() -> None:
    with pytest.raises(FormatError, match="not a dict"):
        keys_of([1], where="here")
