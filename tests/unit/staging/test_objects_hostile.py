"""Planted and damaged documents are refused, and do nothing else."""

from __future__ import annotations

import time as clock
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.entries import (
    Entries,
)
from torch_ckpt.errors import ClassNotLoaded, FormatError, PickleRefused
from torch_ckpt.manifest.schema import Json
from torch_ckpt.staging.objects import decode, encode, pickled

HERE = "tests.entries"

MALFORMED: list[Json] = [
    {"$int": "9" * 10**7},
    {"$int": "0x" + "f" * 10**7},
    {"$int": 5},
    {"$int": "0xfg"},
    {"$int": "0x_1"},
    {"$float": "1.0"},
    {"$float": "0000000000000000"},
    {"$float": None},
    {"$complex": [1]},
    {"$complex": [1, 2]},
    {"$str": "\ud800"},
    {"$str": "!"},
    {"$bytes": "ab"},
    {"$bytes": 3},
    {"$bytes_blob": "none"},
    {"$bytes_blob": "f8"},
    {"$range": [1, 2, 0]},
    {"$range": [1]},
    {"$range": "abc"},
    {"$slice": [1]},
    {"$decimal": "x"},
    {"$decimal": [0, [1], 2]},
    {"$fraction": [1, 0]},
    {"$uuid": "x"},
    {"$uuid": 3},
    {"$date": "tomorrow"},
    {"$datetime": [1], "fold": 0, "zone": None},
    {"$datetime": [2024, 1, 1, 1, 1, 1, 1], "fold": 7, "zone": None},
    {"$datetime": [2024, 1, 1, 0, 0, 0, 0], "fold": 0, "zone": "UTC"},
    {"$datetime": [2024, 1, 1]},
    {"$timedelta": [10**12, 0, 0]},
    {"$timezone": [90000000, 0, 0], "name": None},
    {"$timezone": [0], "name": 3},
    {"$zoneinfo": "../../etc/passwd"},
    {"$zoneinfo": "No/Where"},
    {"$zoneinfo": "os.path"},
    {"$path": "a", "kind": "Path2"},
    {"$path": [], "kind": "PosixPath"},
    {"$dtype": "Tensor"},
    {"$dtype": 3},
    {"$layout": "float32"},
    {"$device": "gpu"},
    {"$device": None},
    {"$size": [1.5]},
    {"$size": ["a"]},
    {"$size": {}},
    {"$tuple": {}},
    {"$tuple": [], "more": 1},
    {"$set": [[]]},
    {"$set": [1, 1]},
    {"$frozenset": 3},
    {"$dict": {}},
    {"$dict": [[1]]},
    {"$dict": [[1, 2], [1, 3]]},
    {"$dict": [[[], 2]]},
    {"$dict": [[1, 2], [True, 3]]},
    {"$odict": None},
    {"$counter": [1]},
    {"$deque": [1, 2], "maxlen": 1},
    {"$deque": [], "maxlen": -1},
    {"$deque": [], "maxlen": "x"},
    {"$deque": []},
    {"$tuple": [], "$set": []},
    {"$nope": 1},
    {"$": 1},
    {"$type": "int"},
    {"$type": ":"},
    {"$type": "builtins:"},
    {"$type": "builtins:int.real"},
    {"$type": 5},
    {"$type": "builtins:len"},
    {"$enum": f"{HERE}:Colour"},
    {"$enum": f"{HERE}:Colour", "member": "x"},
    {"$enum": f"{HERE}:Colour", "member": []},
    {"$enum": f"{HERE}:Access", "bits": 1 << 70},
    {"$enum": f"{HERE}:Access", "bits": "1"},
    {"$enum": f"{HERE}:Access", "bits": 1, "member": "READ"},
    {"$namespace": [[1, 2]]},
    {"$namespace": {"a": 1}},
    {"$dataclass": f"{HERE}:Config", "fields": [1]},
    {"$dataclass": f"{HERE}:Config"},
    {"$mapping": f"{HERE}:Attributes", "items": {}},
    {"$ndarray": "f8", "dtype": "<f8", "shape": [1 << 40], "order": "C"},
    {"$ndarray": "f8", "dtype": "<f4", "shape": [4], "order": "C"},
    {"$ndarray": "f8", "dtype": "<f8", "shape": [-4], "order": "C"},
    {"$ndarray": "f8", "dtype": "<f8", "shape": [2, 2], "order": "C"},
    {"$ndarray": "f8", "dtype": "<f8", "shape": [4], "order": "A"},
    {"$ndarray": "u1", "dtype": "|O", "shape": [1], "order": "C"},
    {"$ndarray": "u1", "dtype": "O", "shape": [1], "order": "C"},
    {"$ndarray": "u1", "dtype": "T", "shape": [1], "order": "C"},
    {
        "$ndarray": "u1",
        "dtype": {"names": ["a"], "formats": ["O"], "offsets": [0], "itemsize": 8},
        "shape": [1],
        "order": "C",
    },
    {
        "$ndarray": "u1",
        "dtype": {"names": ["a"], "formats": ["<f8"], "offsets": [4], "itemsize": 8},
        "shape": [1],
        "order": "C",
    },
    {
        "$ndarray": "u1",
        "dtype": {"names": ["a"], "formats": ["<f8"], "offsets": [-8], "itemsize": 8},
        "shape": [1],
        "order": "C",
    },
    {"$ndarray": "u1", "dtype": ">f8", "shape": [2], "order": "C"},
    {"$ndarray": "u1", "dtype": ">f8", "shape": [1] * 100, "order": "C"},
    {"$ndarray": "u1", "dtype": "<U999999999", "shape": [1], "order": "C"},
    {"$ndarray": "u1", "dtype": "f8,f8", "shape": [1], "order": "C"},
    {"$numpy": "AAAA", "dtype": "<f8"},
    {"$numpy": "", "dtype": "<f8"},
    {"$numpy": "AA==", "dtype": "|O"},
    {"$numpy": "AAAAAAAAAAA=", "dtype": {"base": "<f4", "shape": [2]}},
    {"$numpy_str": 3},
    {"$numpy_bytes": 3},
    {"$numpy_random": "Generator", "state": {}},
    {"$numpy_random": "Generator", "state": 3},
    {
        "$numpy_random": "PCG64",
        "state": {
            "bit_generator": "PCG64",
            "state": {"state": -1, "inc": 2},
            "has_uint32": 0,
            "uinteger": 0,
        },
    },
    {"$omegaconf": 3, "readonly": None, "struct": None},
    {"$pickle": 1},
    {"$pickle": []},
]


@pytest.mark.parametrize("document", MALFORMED, ids=lambda document: str(document)[:60])
def test_malformed_documents_are_refused(document: Json) -> None:
    entries = Entries(allow_pickle=True)
    entries.held["f8"] = np.zeros(4)
    entries.held["u1"] = np.zeros(8, np.uint8)
    start = clock.monotonic()
    for wrapped in (document, {"a": [document]}, {"$dict": [[document, 1]]}):
        with pytest.raises((ClassNotLoaded, FormatError)):
            decode(wrapped, entries, "root")
    assert clock.monotonic() - start < 2


def test_a_planted_random_state_cannot_read_past_its_arrays() -> None:
    entries = Entries()
    document = encode(np.random.RandomState(1), "r", entries)
    state = document["state"]
    for position in (625, -1, 10**9, 1 << 70, "x", True):
        inner = {**state["state"], "pos": position}
        with pytest.raises((ClassNotLoaded, FormatError)):
            decode({**document, "state": {**state, "state": inner}}, entries)
    entries.held["r.state.key"] = np.zeros(3, np.uint32)
    with pytest.raises((ClassNotLoaded, FormatError)):
        decode(document, entries)


TAGS = [
    "$int", "$float", "$str", "$complex", "$bytes", "$bytearray", "$bytes_blob", "$bytearray_blob",
    "$range", "$decimal", "$fraction", "$uuid", "$datetime", "$date", "$time", "$timedelta",
    "$timezone", "$zoneinfo", "$path", "$dtype", "$layout", "$memory_format", "$device", "$size",
    "$ndarray", "$numpy", "$numpy_str", "$numpy_bytes", "$numpy_random", "$type", "$enum",
    "$dataclass", "$namedtuple", "$mapping", "$namespace", "$simple_namespace", "$omegaconf",
    "$tuple", "$dict", "$odict", "$defaultdict", "$counter", "$deque", "$set", "$frozenset",
    "$slice", "$pickle", "$tensor", "$per_rank", "$unknown",
]  # fmt: skip
SIBLINGS = {
    "$datetime": ["fold", "zone"], "$time": ["fold", "zone"], "$timezone": ["name"],
    "$path": ["kind"],
    "$ndarray": ["dtype", "shape", "order"], "$numpy": ["dtype"], "$numpy_random": ["state"],
    "$enum": ["member", "bits"], "$dataclass": ["fields"], "$namedtuple": ["names", "values"],
    "$mapping": ["items"], "$omegaconf": ["readonly", "struct"], "$defaultdict": ["factory"],
    "$deque": ["maxlen"], "$pickle": ["type"],
}  # fmt: skip
CLASSES = ["Config", "Colour", "Access", "Point", "Attributes", "Odd", "Slotted"]
WORDS = ["u1", "f8", "<f8", "|V0", "C", "F", "PCG64", "MT19937", "UTC", "list", "PosixPath"]
NAMES = st.sampled_from([f"{HERE}:{name}" for name in CLASSES] + ["builtins:int", *WORDS])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | NAMES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(TAGS), inner, max_size=3)
        | st.sampled_from(TAGS).flatmap(
            lambda mark: st.fixed_dictionaries(
                {mark: inner, **dict.fromkeys(SIBLINGS.get(mark, []), inner)}
            )
        )
        | st.lists(st.tuples(inner, inner).map(list), max_size=3)
    ),
    max_leaves=12,
)


class Hostile(Entries):
    """Every name has an entry, of some kind."""

    def leaf(self, at: str, what: Any) -> Any:
        return torch.zeros(1) if at == "$tensor" else super().leaf(at, what)

    def blob(self, path: str, data: np.ndarray | None = None) -> Any:
        return np.zeros(4) if path == "f8" else np.zeros(8, np.uint8)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JUNK, st.booleans())
def test_no_document_raises_anything_but_a_refusal(document: Json, allow_pickle: bool) -> None:
    pickled(document)
    try:
        decode(document, Hostile(allow_pickle=allow_pickle))
    except (ClassNotLoaded, FormatError, PickleRefused):
        pass
