"""numpy in documents: arrays as tensor entries, scalars in place, generators by their state.

Knows dtypes, shapes and the bytes they need. Knows nothing of torch or of other values.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from torch_ckpt.staging.scalars import read_blob_bytes, read_str, unpacked, write_str
from torch_ckpt.staging.walk import Json, Reading, Tag, Write, Writing, tag

_MAX_DTYPE_LEVELS = 8

_NATIVE = frozenset(
    np.dtype(code)
    for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
)
"""What torch has too; arrays of these are tensor entries of the same type."""

_PLAIN_DTYPE = re.compile(r"[<>|][biufcSUVmM]\d{1,9}(\[\w{1,12}\])?|[bBhHiIlLqQ]")
"""Never "O": its bytes would be taken for addresses."""


def _write_dtype(dtype: np.dtype[Any]) -> Json:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _write_dtype(base), "shape": list(shape)}
    if dtype.names is None:
        # Two C types of one size, such as long and long long, share a str but not a scalar type.
        same = dtype.char not in "bBhHiIlLqQ" or np.dtype(dtype.str).char == dtype.char
        return dtype.str if same else dtype.char
    fields = [dtype.fields[name] for name in dtype.names]  # type: ignore[index]
    return {
        "names": list(dtype.names),
        "formats": [_write_dtype(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }


def _read_dtype(walk: Reading, document: Json, path: str, levels: int = 0) -> np.dtype[Any]:
    if type(document) is str:
        if not _PLAIN_DTYPE.fullmatch(document):
            walk.refuse(path, f"the dtype {document[:40]!r}")
        return np.dtype(document)
    if type(document) is not dict or levels > _MAX_DTYPE_LEVELS:
        walk.refuse(path, "something else where a dtype should be")
    if "base" in document:
        base = _read_dtype(walk, document["base"], path, levels + 1)
        return np.dtype((base, _read_shape(walk, document["shape"], path)))
    formats = [_read_dtype(walk, item, path, levels + 1) for item in document["formats"]]
    offsets = _read_shape(walk, document["offsets"], path)
    names, itemsize = document["names"], document["itemsize"]
    if len(names) > 4096 or not all(type(name) is str for name in names):
        walk.refuse(path, "a dtype whose fields have no names")
    _read_shape(walk, [itemsize], path)
    return np.dtype(
        {"names": names, "formats": formats, "offsets": list(offsets), "itemsize": itemsize}
    )


def _read_shape(walk: Reading, shape: Json, path: str) -> tuple[int, ...]:
    if type(shape) is not list or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
        walk.refuse(path, "something else where a shape should be")
    return tuple(shape)


def _exact_dtype(dtype: np.dtype[Any]) -> Json | None:
    """The document of a dtype, or None if it would not come back the same."""
    if dtype.hasobject or dtype.metadata is not None:
        return None
    document = _write_dtype(dtype)
    try:
        back = _read_dtype(_NOWHERE, document, "")
    except (KeyError, TypeError, ValueError):
        return None
    return document if back == dtype and back.type is dtype.type else None


class _Nowhere:
    """Stands in for the decoder where a dtype is only tried out."""

    allow_pickle = False

    def leaf(self, tag: str, document: dict[str, Json]) -> object:
        """There are no leaves."""
        raise KeyError(tag)

    def blob(self, name: str) -> np.ndarray:
        """There are no blobs."""
        raise KeyError(name)


_NOWHERE = Reading(_Nowhere(), {})


def _write_array(walk: Writing, value: np.ndarray, path: str) -> Json:
    dtype = _exact_dtype(value.dtype)
    if dtype is None:
        return walk.pickle(value, path)
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    packed = value.T if order == "F" else value
    if not packed.flags.c_contiguous or not packed.flags.writeable:
        packed = packed.copy(order="C")
    if value.dtype not in _NATIVE:
        packed = np.frombuffer(bytearray(packed.tobytes()), np.uint8)
    return {
        "$ndarray": walk.blob(path, packed),
        "dtype": dtype,
        "shape": list(value.shape),
        "order": order,
    }


def _read_array(walk: Reading, document: dict[str, Json], path: str) -> np.ndarray:
    dtype = _read_dtype(walk, document["dtype"], path)
    shape = _read_shape(walk, document["shape"], path)
    if document["order"] not in ("C", "F"):
        walk.refuse(path, "an array in neither C nor Fortran order")
    stored = shape[::-1] if document["order"] == "F" else shape
    if dtype in _NATIVE:
        data = walk.blob(document["$ndarray"], path)
        if data.dtype != dtype or data.shape != stored:
            walk.refuse(
                path, f"an array of {dtype} {shape} whose entry is {data.dtype} {data.shape}"
            )
        data = np.ascontiguousarray(data).reshape(stored).view(dtype)
    else:
        data = _from_bytes(
            walk, read_blob_bytes(walk, document["$ndarray"], path), dtype, stored, path
        )
    return data.T if document["order"] == "F" else data


def _from_bytes(
    walk: Reading, data: Any, dtype: np.dtype[Any], shape: tuple[int, ...], path: str
) -> np.ndarray:
    if len(data) != math.prod(shape) * dtype.itemsize:
        walk.refuse(path, f"{len(data)} bytes for {shape} of {dtype.itemsize} bytes each")
    return np.ndarray(shape, dtype, data)


def write_scalar(walk: Writing, value: np.generic, path: str) -> Json:
    """Any numpy scalar, by its bytes; text by its characters, since numpy drops trailing NULs."""
    if type(value) is np.str_:
        return {"$numpy_str": write_str(walk, str.__str__(value), path)}
    if type(value) is np.bytes_:
        return {"$numpy_bytes": base64.b64encode(bytes(value)).decode()}
    dtype = _exact_dtype(value.dtype)
    if dtype is None or value.dtype.type is not type(value):
        return walk.pickle(value, path)
    return {"$numpy": base64.b64encode(value.tobytes()).decode(), "dtype": dtype}


def _read_scalar(walk: Reading, document: dict[str, Json], path: str) -> object:
    dtype = _read_dtype(walk, document["dtype"], path)
    if dtype.subdtype is not None or dtype.kind in "SU":
        walk.refuse(path, f"a scalar of {dtype}")
    return _from_bytes(walk, bytearray(unpacked(document["$numpy"])), dtype, (), path)[()]


# The numbers are the lengths of what the generators read from without checking again.
_ENGINES: Mapping[str, tuple[type[Any], dict[str, int], dict[str, int]]] = {
    "MT19937": (np.random.MT19937, {"key": 624}, {"pos": 624}),
    "PCG64": (np.random.PCG64, {}, {}),
    "PCG64DXSM": (np.random.PCG64DXSM, {}, {}),
    "Philox": (np.random.Philox, {"counter": 4, "key": 2, "buffer": 4}, {"buffer_pos": 4}),
    "SFC64": (np.random.SFC64, {"state": 4}, {}),
}


def _write_generator(walk: Writing, value: Any, path: str) -> Json:
    if type(value) is np.random.RandomState:
        state = value.get_state(legacy=False)
    else:
        state = (value.bit_generator if type(value) is np.random.Generator else value).state
    if state["bit_generator"] not in _ENGINES:
        return walk.pickle(value, path)
    walk.enter(value, path, 1)
    document = {"$numpy_random": type(value).__name__, "state": walk.value(state, path)}
    walk.leave(value)
    return document


def _read_generator(walk: Reading, document: dict[str, Json], path: str) -> object:
    kind = walk.text(document["$numpy_random"], path)
    state: Any = walk.value(document["state"], path)
    engine, arrays, positions = _ENGINES[state["bit_generator"]]
    inner = {**state, **state["state"]}
    for name, length in arrays.items():
        array = inner[name]
        if type(array) is not np.ndarray or array.shape != (length,) or array.dtype.kind != "u":
            walk.refuse(path, f"a random state whose {name} is not {length} integers")
    for name, limit in positions.items():
        if type(inner[name]) is not int or not 0 <= inner[name] <= limit:
            walk.refuse(path, f"a random state whose {name} is out of range")
    source = engine(0)
    if kind == "RandomState":
        generator = np.random.RandomState(source)
        generator.set_state(state)
        return generator
    source.state = state
    if kind == "Generator":
        return np.random.Generator(source)
    if kind != state["bit_generator"]:
        walk.refuse(path, f"a {kind[:40]} with the state of a {state['bit_generator']}")
    return source


_SCALARS = [kind for kind in set(np.sctypeDict.values()) if kind is not np.object_]

WRITERS: Mapping[type, Write] = {
    np.ndarray: _write_array,
    **dict.fromkeys(_SCALARS, write_scalar),
    **dict.fromkeys([engine for engine, _, _ in _ENGINES.values()], _write_generator),
    np.random.Generator: _write_generator,
    np.random.RandomState: _write_generator,
}

READERS: Mapping[str, Tag] = {
    "$ndarray": tag(_read_array, "dtype shape order"),
    "$numpy": tag(_read_scalar, "dtype"),
    "$numpy_str": tag(
        lambda walk, document, path: np.str_(read_str(walk, document["$numpy_str"], path))
    ),
    "$numpy_bytes": tag(
        lambda _walk, document, _path: np.bytes_(unpacked(document["$numpy_bytes"]))
    ),
    "$numpy_random": tag(_read_generator, "state"),
}
