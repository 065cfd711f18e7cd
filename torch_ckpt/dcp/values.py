"""What is not a tensor, between DCP's planners and typed documents.

Nothing is pickled but what no document can hold, and that only comes back by permission.
Knows planners and documents. Knows nothing of stores or plans.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from torch_ckpt.errors import FormatError, PickleRefused, UnsupportedState
from torch_ckpt.staging.objects import Json, decode, encode
from torch_ckpt.staging.regions import check_supported


@dataclass(frozen=True)
class PlannerBytes:
    """Bytes that a planner of the user's own made of a value; only such a planner reads them."""

    data: bytes


def resolve_object(planner: SavePlanner, item: WriteItem) -> object:
    """The value behind an item that is not a tensor, before DCP's default planner pickles it."""
    kind: Any = type(planner)
    if (
        isinstance(planner, DefaultSavePlanner)
        and kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    ):
        return planner.lookup_object(item.index)
    made: Any = planner.resolve_data(item)
    return PlannerBytes(bytes(made.getbuffer()))


class Values:
    """Encodes values; tensors and arrays in them are collected under names of their own."""

    def __init__(self, reserved: Iterable[str]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._reserved = set(reserved)
        self._key = ""

    def document(self, key: str, value: object) -> Json:
        """The document of the value under a key.

        Raises:
            UnsupportedState: it cannot be saved; the message names its path.
        """
        self._key = key
        return encode(value, key, self)

    def leaf(self, path: str, value: object) -> Json | None:
        """A tensor that DCP did not find, since it does not look into tuples and objects."""
        if not isinstance(value, torch.Tensor):
            return None
        if isinstance(value, DTensor):
            raise UnsupportedState(
                key=path,
                what="a DTensor inside a tuple or object, where DCP does not look for one",
                remedy="put it into a list or dict",
            )
        check_supported(path, value)
        return {"$tensor": self._keep(path, value.detach())}

    def blob(self, path: str, data: np.ndarray[Any, Any]) -> str:
        """The bytes of an array or of a pickle."""
        return self._keep(path, torch.from_numpy(data))

    def _keep(self, path: str, tensor: torch.Tensor) -> str:
        name, tries = path, 1
        while name in self.tensors or (name in self._reserved and name != self._key):
            tries += 1
            name = f"{path}~{tries}"
        self.tensors[name] = tensor
        return name


class Sources:
    """Decodes values whose tensors and arrays have been read already."""

    def __init__(
        self,
        where: str,
        tensors: Callable[[str], torch.Tensor],
        per_rank: Mapping[str, Json],
        *,
        allow_pickle: bool,
    ) -> None:
        self.allow_pickle = allow_pickle
        self._where, self._tensors, self._per_rank = where, tensors, per_rank

    def bytes_for_planner(self, key: str, document: Json) -> io.BytesIO:
        """The value of a document in the form in which DCP's load planners take it.

        Raises:
            PickleRefused: it was pickled and that was not allowed; names the key.
            FormatError: it is not a document.
        """
        value = decode(document, self, key)
        if isinstance(value, PlannerBytes):
            if not self.allow_pickle:
                raise PickleRefused(where=self._where, values=[f"{key} (made by a planner)"])
            return io.BytesIO(value.data)
        # Of values that were just decoded from checked bytes, so the planner may unpickle it.
        made = io.BytesIO()
        torch.save(value, made)
        made.seek(0)
        return made

    def leaf(self, tag: str, document: dict[str, Json]) -> object:
        """A tensor, or a value of this rank."""
        if tag == "$tensor":
            return self._tensors(document["$tensor"])
        if tag == "$per_rank":
            path = document["$per_rank"]
            if path not in self._per_rank:
                raise FormatError(
                    file=self._where, reason=f"holds no {path!r} for this rank, and it is its own"
                )
            return decode(self._per_rank[path], self, path)
        raise FormatError(file=self._where, reason=f"holds an object of unknown kind {tag!r}")

    def blob(self, name: str) -> np.ndarray[Any, Any]:
        """The bytes of an array or of a pickle."""
        return self._tensors(name).numpy()
