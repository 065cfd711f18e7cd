"""numpy's arrays and scalars in a pickle, rebuilt without numpy's own unpickling.

numpy believes what a pickle says of a dtype: one that is changed a little makes it take bytes for
addresses of objects. Here stand-ins keep what the pickle says, and plain numbers and texts are
made of it afterwards. Knows numpy's pickles. Knows nothing of torch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import numpy as np

_KINDS = "biufcSU"
"""Truth values, numbers, bytes and texts: none of them holds addresses."""

_BYTE_ORDERS = ("<", ">", "|", "=")


class NotPlain(ValueError):
    """An array of something else than numbers and texts, or a malformed one."""


class _StandIn:
    """What a pickle says, kept."""

    __module__ = "numpy"

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        raise TypeError("an array in a place where none is expected")


_Dtype = type("dtype", (_StandIn,), {"__module__": "numpy"})
_Array = type("ndarray", (_StandIn,), {"__module__": "numpy"})
_Scalar = type("scalar", (_StandIn,), {"__module__": "numpy._core.multiarray"})


def named(call: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    """A call under another name, by which a pickle asks for it."""

    def stand_in(*arguments: Any) -> Any:
        return call(*arguments)

    stand_in.__module__, stand_in.__name__, stand_in.__qualname__ = module, name, name
    return stand_in


STAND_INS: list[Any] = [
    _Dtype,
    _Array,
    _Scalar,
    named(_Scalar, "numpy.core.multiarray", "scalar"),
    # Its arguments are the class, a shape and a dtype of no meaning: what is built comes later.
    *(
        named(lambda *_: _Array(), f"numpy.{home}.multiarray", "_reconstruct")
        for home in ("core", "_core")
    ),
]
"""What a pickle finds under numpy's names, in numpy before 2.0 and since."""


def rebuilt(value: Any) -> Any:
    """The same state with real arrays and scalars; containers are changed in place where they can.

    Raises:
        NotPlain: only numpy's own unpickling could make something of it.
    """
    if isinstance(value, _StandIn):
        return _real(value)
    if isinstance(value, dict):
        items = [(rebuilt(key), rebuilt(item)) for key, item in value.items()]
        value.clear()
        value.update(items)
    elif type(value) is list:
        value[:] = map(rebuilt, value)
    elif type(value) in (tuple, set, frozenset):
        return type(value)(map(rebuilt, value))
    elif type(value) is argparse.Namespace:
        rebuilt(vars(value))
    return value


def _real(value: _StandIn) -> Any:
    try:
        if type(value) is _Scalar:
            dtype, data = value.arguments
            return np.frombuffer(_bytes(data), _dtype(dtype), 1)[0]
        if type(value) is _Dtype:
            return _dtype(value)
        if type(value) is _Array:
            _, shape, dtype, by_columns, data = value.state
            return _array(shape, _dtype(dtype), _bytes(data), by_columns=bool(by_columns))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise NotPlain(f"numpy.ndarray, but {error}") from error
    raise NotPlain("numpy.ndarray, but unfinished")


def _array(shape: Any, dtype: np.dtype[Any], data: bytes, *, by_columns: bool) -> Any:
    if type(shape) is not tuple or not all(type(one) is int and one >= 0 for one in shape):
        raise ValueError("its shape is no shape")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {dtype} of shape {shape}")
    flat = np.frombuffer(bytearray(data), dtype)  # which can be written to, unlike bytes
    return flat.reshape(shape, order="F" if by_columns else "C")


def _dtype(value: Any) -> np.dtype[Any]:
    if type(value) is not _Dtype or not value.arguments or type(value.arguments[0]) is not str:
        raise ValueError("its dtype is no dtype")
    dtype = np.dtype(value.arguments[0])
    if dtype.kind not in _KINDS or dtype.subdtype is not None or dtype.itemsize == 0:
        raise ValueError(f"its dtype is {dtype}")
    order = value.state[1] if type(value.state) is tuple and len(value.state) > 1 else "="
    if order not in _BYTE_ORDERS:
        raise ValueError("its byte order is none")
    return dtype.newbyteorder(order)


def _bytes(data: Any) -> bytes:
    if type(data) is not bytes:
        raise ValueError("its elements are objects")
    return data
