"""Two generations side by side: tensors by their bits and by how much, objects by their documents.

Knows opened generations. Knows nothing of output. Holds one group of tensors of each at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_ckpt.cli.tree import Node, nodes, unique
from torch_ckpt.export import BATCH_BYTES, read_whole
from torch_ckpt.load import Opened
from torch_ckpt.manifest.dtypes import DTYPES
from torch_ckpt.staging.documents import Stored

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, kw_only=True)
class Differences:
    """What is not the same, in the order of A and then of B."""

    tensors: list[dict[str, Any]]
    objects: list[dict[str, Any]]
    tensors_compared: int
    objects_compared: int

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.tensors and not self.objects


def compare(a: Opened, b: Opened) -> Differences:
    """Every difference between two generations; what is read is verified.

    Raises:
        IntegrityError: stored bytes are not the ones that were written.
    """
    comparison = _Comparison(a, b)
    comparison.compare_documents()
    comparison.compare_bytes()
    return comparison.differences()


class _Comparison:
    """What has been found so far."""

    def __init__(self, a: Opened, b: Opened) -> None:
        self._a, self._b = a, b
        self._ours, self._theirs = unique(_nodes(a)), unique(_nodes(b))
        self._paths = list(dict.fromkeys([*self._ours, *self._theirs]))
        self._entries: dict[str, tuple[Stored, Stored]] = {}
        """What is of one dtype and shape on both sides, so that its bytes decide."""
        self._tensors: dict[str, dict[str, Any]] = {}
        self._objects: dict[str, dict[str, Any]] = {}
        self._tensors_compared = self._objects_compared = 0

    def differences(self) -> Differences:
        return Differences(
            tensors=[self._tensors[path] for path in self._paths if path in self._tensors],
            objects=[self._objects[path] for path in self._paths if path in self._objects],
            tensors_compared=self._tensors_compared,
            objects_compared=self._objects_compared,
        )

    def compare_documents(self) -> None:
        """Find what documents tell, and what only bytes can."""
        for path in self._paths:
            one, other = self._ours.get(path), self._theirs.get(path)
            kinds = {node.kind for node in (one, other) if node is not None}
            if kinds == {"tensor"}:
                self._tensors_compared += 1
                self._look_at_tensor(path, one, other)
            else:
                leaves = [node.leaf for node in (one, other) if node is not None]
                self._objects_compared += any(leaves)
                if any(leaves) or len(kinds) == 2:
                    self._look_at_object(path, one, other)

    def compare_bytes(self) -> None:
        """Read what documents could not tell apart."""
        for batch in _batches(self._entries):
            ours = read_whole(self._a, {self._entries[path][0].name for path in batch})
            theirs = read_whole(self._b, {self._entries[path][1].name for path in batch})
            for path in batch:
                one, other = self._entries[path]
                difference = _measure(path, ours[one.name], theirs[other.name])
                if difference is None:
                    continue
                if self._ours[path].kind == "tensor":
                    self._tensors[path] = difference
                else:
                    self._differ(path)

    def _look_at_tensor(self, path: str, one: Node | None, other: Node | None) -> None:
        if one is None or other is None:
            self._tensors[path] = _tensor(path, only_in="b" if one is None else "a")
            return
        x, y = self._a.stored(str(one.entry)), self._b.stored(str(other.entry))
        if (x.dtype, x.shape) == (y.dtype, y.shape):
            self._entries[path] = x, y
        else:
            reason = f"{x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}"
            self._tensors[path] = _tensor(path, reason=reason)

    def _look_at_object(self, path: str, one: Node | None, other: Node | None) -> None:
        if one is None or other is None or _outline(one) != _outline(other):
            if one is None or other is None or one.kind != other.kind or (one.leaf and other.leaf):
                self._differ(path)  # where one is empty, what the other holds says it already
        elif one.entry is not None and other.entry is not None:
            x, y = self._a.stored(one.entry), self._b.stored(other.entry)
            if (x.dtype, x.shape) == (y.dtype, y.shape):
                self._entries[path] = x, y
            else:
                self._differ(path)

    def _differ(self, path: str) -> None:
        one, other = self._ours.get(path), self._theirs.get(path)
        self._objects[path] = {
            "path": path,
            "only_in": "b" if one is None else "a" if other is None else None,
            "a": None if one is None else _text(one),
            "b": None if other is None else _text(other),
        }


def _nodes(opened: Opened) -> Iterator[Node]:
    found = [nodes(opened.tree)]
    for part in opened.parts:
        for path, document in part.per_rank.items():
            found.append(nodes(document, f"{path}@rank{part.rank}"))
    return (node for one in found for node in one if node.kind != "per_rank")


def _outline(node: Node) -> Any:
    """What of a node is compared at its own place; its contents have places of their own."""
    if not node.leaf:
        return node.kind, "contents"
    if node.entry is not None:  # the entry's name may differ, its bytes are compared
        return node.kind, {k: v for k, v in node.document.items() if v != node.entry}
    # Not the documents themselves: to Python 1, 1.0 and True are equal, and so are 0.0 and -0.0.
    return node.kind, repr(node.document)


def _text(node: Node) -> str:
    return node.text() if node.leaf else f"a {node.kind}"


def _tensor(path: str, **facts: Any) -> dict[str, Any]:
    fields = ("only_in", "reason", "max_abs", "max_rel", "count", "elements")
    return {"name": path, **dict.fromkeys(fields), **facts}


def _batches(entries: Mapping[str, tuple[Stored, Stored]]) -> Iterator[list[str]]:
    batch: list[str] = []
    total = 0
    for path, (stored, _) in entries.items():
        size = math.prod(stored.shape) * DTYPES[stored.dtype].itemsize
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(path)
        total += size
    if batch:
        yield batch


def _measure(path: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any] | None:
    if not a.numel():
        return None
    bits = [x.reshape(-1).view(torch.uint8).view(-1, x.element_size()) for x in (a, b)]
    if torch.equal(*bits):
        return None
    unequal = (bits[0] != bits[1]).any(dim=1)
    found = _tensor(path, reason="values", count=int(unequal.sum()), elements=a.numel())
    if not _convertible(a):
        return found
    a, b = a.reshape(-1)[unequal], b.reshape(-1)[unequal]
    x, y = _wide(a), _wide(b)
    if a.dtype in _SIGNED:
        apart = _apart(a.long(), b.long())
    else:
        apart = (x - y).abs()
        apart[(x == y) | (x.isnan() & y.isnan())] = 0  # infinities of one sign, kinds of nan
    largest = torch.maximum(x.abs(), y.abs())
    relative = torch.where(apart == 0, torch.zeros_like(apart), apart / largest)
    return {**found, "max_abs": float(apart.max()), "max_rel": float(relative.max())}


def _apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """|x-y| of whole numbers; those near 2^62 are one and the same as floats."""
    wrapped = torch.where(x > y, x - y, y - x).to(torch.float64)
    return torch.where(wrapped < 0, wrapped + 2.0**64, wrapped)


def _convertible(tensor: torch.Tensor) -> bool:
    return "float4" not in str(tensor.dtype)  # two numbers in one element; torch converts neither


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    if tensor.element_size() == 1 and tensor.is_floating_point():
        tensor = tensor.to(torch.float32)  # fp8 has no way to float64 in some versions
    return tensor.to(torch.float64)
