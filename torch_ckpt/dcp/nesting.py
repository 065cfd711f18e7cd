"""DCP's flat keys and the nested state: one way for the document, the other way for the reader.

Knows key paths and documents. Knows nothing of stores or tensors' bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from torch_ckpt.dcp.values import Values
from torch_ckpt.errors import FormatError, UnsupportedState
from torch_ckpt.staging.bind import mapping_items
from torch_ckpt.staging.objects import Json
from torch_ckpt.staging.walk import is_plain

Path = tuple[str | int, ...]
"""Where a value is in the nested state, as DCP's planner data say: dict keys and list places."""


@dataclass(frozen=True)
class _Leaf:
    document: Json


def tree_of(metadata: Metadata, documents: Mapping[str, Json]) -> Json:
    """The document of the nested state.

    Args:
        documents: By key, what is not a tensor.

    Raises:
        UnsupportedState: a key is a value on one rank and a container on another.
    """
    kinds = metadata.state_dict_metadata
    known: Mapping[str, Any] = (
        metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    )
    root: dict[str, Any] = {}
    in_order = [key for key in known if key in kinds]
    for key in [*in_order, *(key for key in kinds if key not in known)]:
        if isinstance(kinds[key], BytesStorageMetadata):
            document = documents[key]
        else:
            document = {"$tensor": key}
        _put(root, _path(known.get(key), key), _Leaf(document), key)
    return _document(root)


def _document(node: Any) -> Json:
    if isinstance(node, _Leaf) or node is None:
        return None if node is None else node.document
    if isinstance(node, list):
        return [_document(item) for item in node]
    if all(key[:1] != "$" and is_plain(key) for key in node):
        return {key: _document(item) for key, item in node.items()}
    keys = Values(())
    return {"$dict": [[keys.document(key, key), _document(item)] for key, item in node.items()]}


def _path(given: Any, key: str) -> Path:
    whole = type(given) is tuple and given and all(type(one) in (str, int) for one in given)
    return given if whole and type(given[0]) is str else (key,)


def _put(root: dict[str, Any], path: Path, value: Any, key: str) -> None:
    node: Any = root
    for place, following in pairwise(path):
        kind = list if type(following) is int else dict
        inner = _at(node, place)
        if inner is None:
            inner = kind()
            _set(node, place, inner)
        if type(inner) is not kind:
            raise UnsupportedState(
                key=key,
                what="a value on one rank and inside a container on another",
                remedy="give the ranks' values keys of their own",
            )
        node = inner
    if _at(node, path[-1]) is not None:
        raise UnsupportedState(
            key=key,
            what="a container on one rank and a value on another",
            remedy="give the ranks' values keys of their own",
        )
    _set(node, path[-1], value)


def _at(node: Any, place: str | int) -> Any:
    if isinstance(node, list):
        return node[place] if isinstance(place, int) and place < len(node) else None
    return node.get(place)


def _set(node: Any, place: Any, value: Any) -> None:
    if type(place) is int:
        node.extend([None] * (place + 1 - len(node)))  # places that other ranks fill, if any does
    node[place] = value


@dataclass(frozen=True, slots=True)
class Key:
    """One of DCP's keys: the path it was made from, and the document there."""

    path: Path
    document: Json

    @property
    def tensor(self) -> str | None:
        """The tensor's name, if it is one."""
        return _tensor_in(self.document)


def keys_of(tree: Json, *, where: str) -> dict[str, Key]:
    """The keys that DCP's planners would give to the values of a state.

    Raises:
        FormatError: the state is no dict, or two of its values would have one key.
    """
    if mapping_items(tree) is None:
        raise FormatError(file=where, reason="its state is not a dict, which DCP's planners need")
    found: dict[str, Key] = {}
    waiting: list[tuple[Path, Json]] = [((), tree)]
    while waiting:
        path, document = waiting.pop()
        items = mapping_items(document)
        if items is not None:
            inside = [((*path, str(key)), item) for key, item in items]
        elif isinstance(document, list) and not _is_value(document):
            inside = [((*path, place), item) for place, item in enumerate(document)]
        else:
            key = ".".join(map(str, path))
            if key in found:
                raise FormatError(file=where, reason=f"DCP would read two values as {key!r}")
            found[key] = Key(path, document)
            continue
        waiting += reversed(inside)
    return found


def _is_value(document: Json) -> bool:
    """Whether DCP takes this as a whole: a list of neither tensors nor containers of them."""
    if mapping_items(document) is not None:
        return False
    if not isinstance(document, list):
        return True
    return all(_is_value(item) and _tensor_in(item) is None for item in document)


def _tensor_in(document: Json) -> str | None:
    if isinstance(document, dict) and len(document) == 1:
        name = document.get("$tensor")
        return name if isinstance(name, str) else None
    return None
