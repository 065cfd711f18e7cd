"""The typed document of a state as a flat list: key path and what is there.

Knows the tags of docs/objects.md by which a document nests. Imports no torch, rebuilds no value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Json = Any

BLOBS = ("$ndarray", "$pickle", "$bytes_blob", "$bytearray_blob")
"""Tags of values whose bytes lie in a tensor entry."""

_PAIRS = ("$dict", "$odict", "$counter", "$defaultdict", "$namespace", "$simple_namespace")
_ITEMS = ("$tuple", "$deque")


@dataclass(frozen=True, slots=True)
class Node:
    """One value in a document."""

    path: str
    kind: str
    """dict, tuple, int, ndarray, pickle, ..."""
    document: Json
    leaf: bool
    """Whether it holds no further nodes; an empty container is one."""

    @property
    def entry(self) -> str | None:
        """The tensor entry that it is, or that its bytes lie in."""
        return next((self.document[t] for t in ("$tensor", *BLOBS) if self._has(t)), None)

    @property
    def pickled(self) -> bool:
        """Whether reading it back runs a pickle."""
        return self._has("$pickle")

    def text(self) -> str:
        """The value for people, on one line."""
        doc = self.document
        if self.pickled:
            return f"PICKLED {doc.get('type', 'unknown')}"
        if self.kind == "ndarray":
            return f"{doc.get('dtype')}{doc.get('shape')}"
        if self.entry is not None:
            return "bytes stored beside the tensors"
        if isinstance(doc, dict) and len(doc) == 1 and self.kind != "dict":
            (doc,) = doc.values()
        return doc if isinstance(doc, str) and doc else json.dumps(doc, ensure_ascii=False)

    def _has(self, tag: str) -> bool:
        return type(self.document) is dict and tag in self.document


def nodes(document: Json, path: str = "") -> Iterator[Node]:
    """Every value in a document, containers before their contents, in order."""
    waiting = [(path, document)]
    while waiting:
        place, doc = waiting.pop()
        kind, inside = _kind(doc), list(_inside(doc))
        yield Node(place, kind, doc, leaf=not inside)
        waiting += [(f"{place}.{key}" if place else key, item) for key, item in reversed(inside)]


def _kind(doc: Json) -> str:
    if doc is None:
        return "None"
    if type(doc) is not dict:
        return type(doc).__name__
    marks = [key for key in doc if key[:1] == "$"]
    return marks[0][1:] if marks else "dict"


def _inside(doc: Json) -> Iterator[tuple[str, Json]]:
    if type(doc) is list:
        yield from ((str(index), item) for index, item in enumerate(doc))
    elif type(doc) is dict:
        mark = next((key for key in doc if key[:1] == "$"), None)
        if mark is None:
            yield from doc.items()
        elif mark in _PAIRS:
            yield from _pairs(doc[mark])
        elif mark == "$mapping":
            yield from _pairs(doc.get("items"))
        elif mark in _ITEMS and type(doc[mark]) is list:
            yield from ((str(index), item) for index, item in enumerate(doc[mark]))
        elif mark == "$dataclass" and type(doc.get("fields")) is dict:
            yield from doc["fields"].items()
        elif mark == "$namedtuple" and type(doc.get("values")) is list:
            yield from zip(map(str, doc.get("names") or []), doc["values"], strict=False)
        elif mark == "$omegaconf":
            yield from _inside(doc[mark])


def _pairs(pairs: Json) -> Iterator[tuple[str, Json]]:
    for pair in pairs if type(pairs) is list else []:
        if type(pair) is list and len(pair) == 2:
            key = pair[0]
            yield key if type(key) is str else json.dumps(key, ensure_ascii=False), pair[1]


def unique(found: Iterator[Node]) -> Mapping[str, Node]:
    """Nodes by path; a second one whose path reads the same ("1" and 1) gets a number."""
    by_path: dict[str, Node] = {}
    for node in found:
        name, tries = node.path, 1
        while name in by_path:
            tries += 1
            name = f"{node.path}~{tries}"
        by_path[name] = node
    return by_path
