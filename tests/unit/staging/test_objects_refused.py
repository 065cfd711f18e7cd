"""What cannot be kept is named, and what is pickled is flagged and needs permission."""

from __future__ import annotations

import collections
import logging
import pickle
import sys
import types
from typing import Any

import numpy as np
import pytest

from tests.entries import (
    RAN,
    Config,
    Entries,
    Plain,
    Planted,
    Point,
    round_trip,
    same,
    through_part,
)
from torch_ckpt.errors import ClassNotLoaded, FormatError, PickleRefused, UnsupportedState
from torch_ckpt.manifest.schema import Part
from torch_ckpt.staging.objects import decode, encode, pickled

HERE = "tests.entries"


def test_what_only_pickle_can_keep_is_flagged_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries = Entries(allow_pickle=True)
    document = None
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            document = encode({"once": {"x": Plain(3), 7: [len]}}, "", entries)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "once.x is a " in messages[0]
    assert "Plain" in messages[0]
    assert pickled(document) == [
        f"once.x ({HERE}.Plain)",
        "once.7.0 (builtins.builtin_function_or_method)",
    ]
    assert decode(document, entries) == {"once": {"x": Plain(3), 7: [len]}}


def test_pickled_values_are_refused_all_at_once_before_anything_is_decoded() -> None:
    entries = Entries()
    document = encode(
        {"a": Planted(), "b": [{2: Planted()}], "c": {"$x": {Planted(): 1}}}, "", entries
    )
    RAN.clear()
    with pytest.raises(PickleRefused) as caught:
        decode(document, entries)
    assert len(caught.value.values) == 3
    assert "b.0.2" in str(caught.value)
    assert RAN == []


def test_a_pickle_is_the_only_thing_that_can_run_code() -> None:
    entries = Entries()
    entries.held["evil"] = np.frombuffer(bytearray(pickle.dumps(Planted())), np.uint8)
    RAN.clear()
    for document in (
        {"$pickle": "evil", "type": "x"},
        {"$defaultdict": [], "factory": {"$pickle": "evil", "type": "x"}},
        {"$dict": [[{"$pickle": "evil", "type": "x"}, 1]]},
        {"$enum": {"$pickle": "evil", "type": "x"}},
        {"$tensor": {"$pickle": "evil", "type": 3}},
    ):
        with pytest.raises(PickleRefused):
            decode(document, entries)
    for document in (
        {"$type": "os:system"},
        {"$type": "subprocess:run"},
        {"$enum": f"{HERE}:Config", "member": "a"},
        {"$dataclass": f"{HERE}:Planted", "fields": {}},
        {"$dataclass": f"{HERE}:Config", "fields": {"name": "a", "method": 1}},
        {"$dataclass": f"{HERE}:Config", "fields": {"name": "a", "__class__": 1}},
        {"$dataclass": f"{HERE}:Config", "fields": {}},
        {"$mapping": f"{HERE}:Planted", "items": []},
        {"$mapping": "collections:defaultdict", "items": []},
        {"$namedtuple": f"{HERE}:Point", "names": ["x"], "values": [1]},
        {"$namedtuple": "builtins:tuple", "names": [], "values": []},
        {"$defaultdict": [], "factory": {"$type": "subprocess:Popen"}},
        {"$defaultdict": [], "factory": "eval"},
    ):
        with pytest.raises((ClassNotLoaded, FormatError)):
            decode(document, entries)
    assert RAN == []


def test_a_class_that_is_not_loaded_is_named_and_never_imported() -> None:
    assert "this" not in sys.modules
    with pytest.raises(ClassNotLoaded, match=r"'this:Zen'.*import it before loading"):
        decode({"a": {"$type": "this:Zen"}}, Entries())
    assert "this" not in sys.modules


def test_lazy_modules_are_not_woken_by_a_name() -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            RAN.append("lazy")
            return super().__getattribute__(name)

        def __getattr__(self, name: str) -> Any:
            RAN.append("lazy")
            return int

    sys.modules["lazy_for_test"] = Lazy("lazy_for_test")
    RAN.clear()
    try:
        with pytest.raises((ClassNotLoaded, FormatError)):
            decode({"$type": "lazy_for_test:Thing"}, Entries())
    finally:
        del sys.modules["lazy_for_test"]
    assert RAN == []


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"a": {"f": lambda: 0}}, "a.f"),
        ({"a": [iter(())], "g": (item for item in ())}, "g"),
        ([1, [open(__file__)]], "1.0"),
        ({"d": collections.defaultdict(lambda: 0)}, "d.default_factory"),
    ],
)
def test_what_cannot_be_pickled_is_named(value: object, key: str) -> None:
    with pytest.raises(UnsupportedState) as caught:
        encode(value, "", Entries())
    assert caught.value.key == key


def test_a_container_that_contains_itself_is_named() -> None:
    looped: dict[str, Any] = {"a": {"b": []}}
    looped["a"]["b"].append((looped,))
    with pytest.raises(UnsupportedState) as caught:
        encode(looped, "", Entries())
    assert caught.value.key == "a.b.0.0"
    around: list[Any] = []
    around.append(Config("x", extra={"k": around}))
    inside: list[Any] = []
    inside.append(Point(1, collections.deque([inside])))
    for value in (around, inside):
        with pytest.raises(UnsupportedState, match="contains itself"):
            encode({"k": value}, "", Entries())


def test_the_same_object_twice_is_no_cycle() -> None:
    shared = [1]
    assert round_trip([shared, shared, {"a": shared}]) == [[1], [1], {"a": [1]}]


@pytest.mark.parametrize(
    "wrap",
    [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: {1: x}, Point],
)
def test_deep_nesting_is_kept_or_refused_but_never_a_recursion_error(wrap: Any) -> None:
    value: Any = 1
    for _ in range(60):
        value = wrap(value)
    entries = Entries()
    document = through_part(encode(value, "", entries))
    assert same(value, decode(document, entries))
    data = Part(
        step=1, attempt="0" * 8, run="r", rank=0, world_size=1, files=(), blocks=(), tensors=(),
        tree=document,
    ).dump()  # fmt: skip
    assert len(data) > 60
    for _ in range(5000):
        value = wrap(value)
    with pytest.raises(UnsupportedState, match="nested too deeply"):
        encode(value, "", entries)


def test_deep_documents_are_refused() -> None:
    for wrap in (lambda x: [x], lambda x: {"a": x}, lambda x: {"$tuple": [x]}):
        document: Any = 1
        for _ in range(20_000):
            document = wrap(document)
        with pytest.raises((ClassNotLoaded, FormatError)):
            decode(document, Entries())
        while isinstance(document, dict | list):  # freed level by level
            document = next(iter(document.values() if isinstance(document, dict) else document))
