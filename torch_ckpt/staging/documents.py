"""Typed documents looked through without being read: what is a dict, which entries are named.

Knows the tags. Knows nothing of live structures or of storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from torch_ckpt.errors import FormatError
from torch_ckpt.staging.objects import Json, decode


@dataclass(frozen=True)
class Stored:
    """What a generation says of one tensor."""

    name: str
    """Where its bytes are: the first of tied names."""
    dtype: str
    shape: tuple[int, ...]


def mapping_items(document: Json) -> list[tuple[Any, Json]] | None:
    """Keys and value documents if the document is that of a dict; None otherwise."""
    if not isinstance(document, dict):
        return None
    for tag in ("$dict", "$odict"):
        if tag in document:
            return [(decode(key, _NoTensors()), item) for key, item in document[tag]]
    return list(document.items()) if not any(key.startswith("$") for key in document) else None


class _NoTensors:
    """Decodes dict keys, which hold no tensors."""

    allow_pickle = False

    def leaf(self, tag: str, document: dict[str, Json]) -> object:
        raise FormatError(file="tree", reason=f"a dict key of kind {tag!r}")

    def blob(self, name: str) -> np.ndarray[Any, Any]:
        raise FormatError(file="tree", reason="a dict key that is stored as an array")


_TENSOR_TAGS = ("$tensor", "$ndarray", "$pickle", "$bytes_blob", "$bytearray_blob")


def names_in(document: Json) -> list[str]:
    """Every tensor entry that a document needs, once each, values of ranks left out."""
    return [name for tag, name in _tagged(document) if tag in _TENSOR_TAGS]


def per_rank_in(document: Json) -> list[str]:
    """The key paths of values of ranks that a document refers to."""
    return [name for tag, name in _tagged(document) if tag == "$per_rank"]


def _tagged(document: Json) -> list[tuple[str, str]]:
    found: dict[tuple[str, str], None] = {}
    waiting = [document]
    while waiting:
        node = waiting.pop()
        if type(node) is list:
            waiting += reversed(node)
        elif type(node) is dict:
            for tag in (*_TENSOR_TAGS, "$per_rank"):
                if type(name := node.get(tag)) is str:
                    found[tag, name] = None
            waiting += reversed(node.values())
    return list(found)
