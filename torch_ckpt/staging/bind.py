"""Fitting a stored document to a live structure: which tensors are filled in place, what replaces
what, and what does not fit.

Binding looks and changes nothing; the caller reads bytes into `targets`; applying puts
everything else in its place. Knows structures and documents. Knows nothing of storage.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from torch_ckpt.errors import FormatError, StateMismatch
from torch_ckpt.staging.documents import Stored, mapping_items, names_in, per_rank_in
from torch_ckpt.staging.objects import Json, child, decode
from torch_ckpt.staging.regions import dtype_name, region_of
from torch_ckpt.staging.resharded import Resize, Source
from torch_ckpt.staging.sharded import is_sharded, local_of
from torch_ckpt.staging.tree import PerRank, flatten, is_stateful
from torch_ckpt.staging.unborn import unborn

logger = logging.getLogger(__name__)


class Bound(Protocol):
    """A place in the live structure and what will be in it."""

    def value(self) -> Any:
        """What belongs there, once all bytes have been read."""
        ...


class Binding:
    """A document bound to a live structure.

    Raises:
        StateMismatch: keys are missing or surplus, or tensors do not fit; lists all of them.
    """

    def __init__(
        self,
        *,
        where: str,
        tree: Json,
        per_rank: Mapping[str, Json],
        stored: Callable[[str], Stored],
        into: Any,
        strict: bool,
        allow_pickle: bool,
        resize: Resize | None = None,
    ) -> None:
        self.allow_pickle = allow_pickle
        self.targets: dict[str, list[torch.Tensor]] = {}
        """Tensors to fill, by stored name."""
        self._where, self._per_rank, self._stored = where, per_rank, stored
        self._strict, self._resize = strict, resize
        self._fresh: dict[str, torch.Tensor] = {}
        self._candidates: dict[str, torch.Tensor] = {}
        self._regions: dict[tuple[object, ...], str] = {}
        self._missing: list[str] = []
        self._surplus: list[str] = []
        self._misshaped: list[str] = []
        self._root = self._bind(tree, into, "")
        if strict and (self._missing or self._surplus or self._misshaped):
            raise StateMismatch(
                where=where,
                missing=self._missing,
                surplus=self._surplus,
                misshaped=self._misshaped,
            )

    def apply(self) -> Any:
        """Put objects in their places and call `load_state_dict`; the filled structure."""
        return self._root.value()

    # What the object decoder asks for.

    def leaf(self, tag: str, document: dict[str, Json]) -> object:
        """A tensor, or a value of this rank."""
        if tag == "$tensor":
            return self._tensor(document["$tensor"])
        if tag == "$per_rank":
            inner = self._per_rank.get(document["$per_rank"])
            return None if inner is None else decode(inner, self)
        raise FormatError(file=self._where, reason=f"holds an object of unknown kind {tag!r}")

    def blob(self, name: str) -> np.ndarray[Any, Any]:
        """The bytes of an array or a pickled object."""
        return self._fresh[self._stored(name).name].numpy()

    def _tensor(self, name: str) -> torch.Tensor:
        stored = self._stored(name).name
        live = self._candidates.get(name)
        return live if live is not None else self._fresh[stored]

    # Binding.

    def _bind(self, document: Json, target: Any, path: str) -> Bound:
        if isinstance(document, dict) and "$per_rank" in document:
            return self._bind_per_rank(document, target, path)
        if isinstance(target, PerRank):
            return _Kept(target, self._bind(document, target.value, path))
        if isinstance(target, torch.Tensor):
            return self._bind_tensor(document, target, path)
        if is_stateful(target):
            return self._bind_stateful(document, target, path)
        if isinstance(target, dict) and (path == "" or _holds_live(target)):
            items = mapping_items(document)
            if items is not None:
                return self._bind_mapping(items, target, path)
        if isinstance(target, (list, tuple)) and _holds_live(target):
            elements = document.get("$tuple") if isinstance(document, dict) else document
            if isinstance(elements, list):
                return self._bind_sequence(elements, target, path)
        if _holds_live(target):
            self._misshaped.append(f"{path or 'the state'} (another kind of value)")
            return _Constant(target)
        self._want(document)
        return _Decoded(document, self, path, target)

    def _bind_per_rank(self, document: Json, target: Any, path: str) -> Bound:
        if self._resize is not None:
            source = Source(self, self._want, mapping_items)
            return self._resize.bind(document["$per_rank"], target, path, source)
        inner = self._per_rank.get(document["$per_rank"])
        if inner is None:
            logger.warning("%s holds no %s of this rank; it stays as it is", self._where, path)
            return _Constant(target)
        if isinstance(target, PerRank):
            return _Kept(target, self._bind(inner, target.value, path))
        return self._bind(inner, target, path)

    def _bind_tensor(self, document: Json, target: torch.Tensor, path: str) -> Bound:
        if isinstance(document, dict) and "$tensor" in document:
            if self._fits(document["$tensor"], target, path):
                self._fill(document["$tensor"], target, path)
        else:
            self._misshaped.append(f"{path} (not a tensor)")
        return _Constant(target)

    def _fits(self, name: str, target: torch.Tensor, path: str) -> bool:
        stored = self._stored(name)
        if stored.shape == tuple(target.shape) and stored.dtype == dtype_name(target.dtype):
            return True
        self._misshaped.append(
            f"{path} (saved {stored.dtype}{list(stored.shape)}, "
            f"given {dtype_name(target.dtype)}{list(target.shape)})"
        )
        return False

    def _fill(self, name: str, target: torch.Tensor, path: str) -> None:
        stored = self._stored(name).name
        local = local_of(target)
        region = region_of(local)
        other = self._regions.setdefault(region, stored)
        if other != stored and local.numel():
            self._misshaped.append(f"{path} (shares its memory with another, was saved apart)")
            return
        self.targets.setdefault(stored, [])
        if all(region != region_of(local_of(tensor)) for tensor in self.targets[stored]):
            self.targets[stored].append(target)

    def _want(self, document: Json) -> None:
        """Fresh memory for every tensor and array of a document that no live tensor takes."""
        for name in names_in(document):
            stored = self._stored(name)
            if name in self._candidates:
                self._fill(name, self._candidates[name], name)
            elif stored.name not in self._fresh:
                fresh = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
                self._fresh[stored.name] = fresh
                self.targets.setdefault(stored.name, []).append(fresh)
        for path in per_rank_in(document):
            if path in self._per_rank:
                self._want(self._per_rank[path])

    def _bind_stateful(self, document: Json, target: Any, path: str) -> Bound:
        module = isinstance(target, torch.nn.Module)
        # keep_vars: a parameter copied onto itself costs nothing in load_state_dict.
        state = target.state_dict(keep_vars=True) if module else target.state_dict()
        flat = flatten(state, path=path)
        live = {**flat.tensors, **flat.sharded}
        live.update({a: live[n] for a, n in flat.aliases.items()})
        whole = target if isinstance(target, torch.optim.Optimizer) else state
        if flat.optimizers or whole is target:
            live = {**unborn(document, whole, self._stored), **live}
        if isinstance(document, dict) and (unread := getattr(target, "unread_keys", ())):
            document = {key: item for key, item in document.items() if key not in unread}
        dropped: set[object] = set()
        items = mapping_items(document)
        if module and items is not None:
            dropped = self._check_module(dict(items), state, path)
        for name in names_in(document):
            tensor = live.get(name)
            if tensor is None or name in flat.arrays:
                continue
            stored = self._stored(name)
            if stored.shape != tuple(tensor.shape):
                continue
            if stored.dtype == dtype_name(tensor.dtype):
                self._candidates[name] = tensor
            elif is_sharded(tensor) and not module:  # an optimizer takes state of any dtype
                dtype = getattr(torch, stored.dtype)
                self._candidates[name] = torch.empty_like(tensor, dtype=dtype)
        self._want(document)
        return _Stateful(target, _Decoded(document, self, path), dropped, self._strict, path)

    def _check_module(
        self, saved: Mapping[Any, Json], state: Mapping[str, Any], path: str
    ) -> set[object]:
        """Note what does not fit; the keys that a lenient load leaves out."""
        self._missing += [child(path, key) for key in state if key not in saved]
        self._surplus += [child(path, key) for key in saved if key not in state]
        unfit: set[object] = set()
        for key, document in saved.items():
            tensor = state.get(key)
            if isinstance(tensor, torch.Tensor) and not (
                isinstance(document, dict)
                and "$tensor" in document
                and self._fits(document["$tensor"], tensor, child(path, key))
            ):
                unfit.add(key)
        return unfit

    def _bind_mapping(
        self, items: list[tuple[Any, Json]], target: dict[Any, Any], path: str
    ) -> Bound:
        saved = dict(items)
        self._missing += [child(path, key) for key in target if key not in saved]
        self._surplus += [child(path, key) for key in saved if key not in target]
        bound = {
            key: self._bind(saved[key], target[key], child(path, key))
            for key in target
            if key in saved
        }
        return _Mapping(target, bound)

    def _bind_sequence(
        self, elements: list[Json], target: list[Any] | tuple[Any, ...], path: str
    ) -> Bound:
        if len(elements) != len(target):
            self._misshaped.append(f"{path} (saved {len(elements)} items, given {len(target)})")
            return _Constant(target)
        bound = [
            self._bind(document, item, child(path, index))
            for index, (document, item) in enumerate(zip(elements, target, strict=True))
        ]
        return _Sequence(target, bound)


@dataclass(frozen=True)
class _Constant:
    kept: Any

    def value(self) -> Any:
        return self.kept


@dataclass(frozen=True)
class _Kept:
    """A marker that stays around what is in it."""

    marker: PerRank
    inner: Bound

    def value(self) -> Any:
        value = self.inner.value()
        return self.marker if value is self.marker.value else PerRank(value)


@dataclass(frozen=True)
class _Decoded:
    document: Json
    binding: Binding
    path: str
    target: Any = None

    def value(self) -> Any:
        value = decode(self.document, self.binding, self.path)
        # The same container with other items: the caller may hold it under a name of its own.
        if type(value) is type(self.target) and type(value) in (dict, OrderedDict, list):
            self.target.clear()
            (self.target.extend if type(value) is list else self.target.update)(value)
            return self.target
        return value


@dataclass(frozen=True)
class _Mapping:
    target: dict[Any, Any]
    items: dict[Any, Bound]

    def value(self) -> Any:
        for key, bound in self.items.items():
            self.target[key] = bound.value()
        return self.target


@dataclass(frozen=True)
class _Sequence:
    target: list[Any] | tuple[Any, ...]
    items: list[Bound]

    def value(self) -> Any:
        values = [bound.value() for bound in self.items]
        if isinstance(self.target, list):
            self.target[:] = values
            return self.target
        if all(new is old for new, old in zip(values, self.target, strict=True)):
            return self.target
        kind = type(self.target)
        return kind(*values) if hasattr(kind, "_fields") else kind(values)


@dataclass(frozen=True)
class _Stateful:
    target: Any
    state: _Decoded
    dropped: set[object]
    strict: bool
    path: str

    def value(self) -> Any:
        state = self.state.value()
        try:
            if isinstance(self.target, torch.nn.Module):
                kept = {key: item for key, item in state.items() if key not in self.dropped}
                self.target.load_state_dict(kept, strict=self.strict)
            else:
                self.target.load_state_dict(state)
        except (ValueError, KeyError, RuntimeError) as error:
            raise StateMismatch(
                where=self.path, misshaped=[f"{type(self.target).__name__}: {error}"]
            ) from error
        return self.target


def _holds_live(value: Any) -> bool:
    """Whether something in it has to be filled in place rather than replaced."""
    if isinstance(value, (torch.Tensor, PerRank)) or is_stateful(value):
        return True
    if isinstance(value, dict):
        return any(_holds_live(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_holds_live(item) for item in value)
