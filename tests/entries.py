"""Tensor entries in memory, and classes of every kind that a state may hold."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import struct
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_ckpt.errors import FormatError
from torch_ckpt.manifest.schema import Json, Part
from torch_ckpt.staging.objects import decode, encode


class Entries:
    """Tensor entries in memory: an encoder and a decoder at once."""

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self.allow_pickle = allow_pickle
        self.held: dict[str, Any] = {}

    def leaf(self, at: str, what: Any) -> Any:
        if isinstance(what, torch.Tensor):
            self.held[at] = what
            return {"$tensor": at}
        if at == "$tensor":
            return self.held[what["$tensor"]]
        if at.startswith("$") and isinstance(what, dict):
            raise FormatError(file="test", reason=f"unknown tag {at}")
        return None

    def blob(self, path: str, data: np.ndarray | None = None) -> Any:
        if data is None:
            if path not in self.held:
                raise FormatError(file="test", reason=f"no entry {path}")
            return self.held[path]
        assert data.flags.c_contiguous
        assert data.flags.writeable
        name = path
        while name in self.held:
            name += "~"
        self.held[name] = torch.from_numpy(data).clone().numpy()
        return name


def through_part(tree: Json) -> Json:
    """The tree as it comes out of a part's bytes."""
    part = Part(
        step=1,
        attempt="0" * 8,
        run="run",
        rank=0,
        world_size=1,
        files=(),
        blocks=(),
        tensors=(),
        tree=tree,
    )
    return json.loads(part.dump())["tree"]


def round_trip(value: object, *, allow_pickle: bool = False) -> Any:
    entries = Entries(allow_pickle=allow_pickle)
    # Below a name, so that no path looks like a tag, which `leaf` is given in reading.
    return decode(through_part(encode(value, "state", entries)), entries)


def same(left: Any, right: Any) -> bool:
    """Equal in type and value, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, np.ndarray):
        equal = left.dtype == right.dtype and left.shape == right.shape
        order = left.flags.f_contiguous == right.flags.f_contiguous
        return equal and (order or not left.flags.forc) and left.tobytes() == right.tobytes()
    if isinstance(left, (Config, Frozen)):
        return same(vars(left), vars(right))
    if isinstance(left, Decimal):
        return left.as_tuple() == right.as_tuple()
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(*pair) for pair in zip(left.items(), right.items(), strict=True)
        )
    if isinstance(left, (list, tuple, collections.deque)):
        return len(left) == len(right) and all(
            same(*pair) for pair in zip(left, right, strict=True)
        )
    if isinstance(left, (set, frozenset)):
        return sorted(map(repr, left)) == sorted(map(repr, right))
    return left == right


class Colour(enum.Enum):
    RED = "red"
    CRIMSON = "red"  # noqa: PIE796 - an alias is meant
    BLUE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Odd(enum.Flag):
    ONE = 1
    TWO = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        RAN.append("missing")
        return super()._missing_(value)


RAN: list[str] = []


class Point(NamedTuple):
    x: int
    y: object = None


@dataclasses.dataclass
class Config:
    name: str
    sizes: tuple[int, ...] = ()
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        RAN.append("post_init")

    def method(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Config
    rate: float = 0.1


@dataclasses.dataclass
class Slotted:
    __slots__ = ("a", "b")
    a: int
    b: object


class Attributes(dict[str, Any]):
    """As Lightning's AttributeDict: no state beside its items."""

    def __init__(self, **items: Any) -> None:
        RAN.append("init")
        super().__init__(**items)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __setitem__(self, key: str, value: Any) -> None:
        RAN.append("setitem")
        super().__setitem__(key, value)


class Planted:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return RAN.append, ("reduce",)


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass
class Hooked:
    a: int

    def __getstate__(self) -> dict[str, int]:
        return {"a": self.a}
