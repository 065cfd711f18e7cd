"""Everything in a state that is not a tensor, as typed JSON that restores it exactly.

What JSON has is itself; everything else is an object with one "$" tag (`docs/objects.md` is the
normative table). What no tag can hold is pickled into a tensor entry and flagged, and it is read
back only by permission; nothing else in a document can run code.
Knows containers and pickle. Knows nothing of tensors: the caller's `leaf` does.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from torch_ckpt.errors import FormatError, PickleRefused, UnsupportedState
from torch_ckpt.staging import arrays, classes, configs, scalars
from torch_ckpt.staging.walk import (
    MAX_LEVELS,
    Decoder,
    Encoder,
    Json,
    Reading,
    Tag,
    Write,
    Writing,
    child,
    is_plain,
    shown,
    sort_key,
    tag,
    too_deep,
)

__all__ = ["Decoder", "Encoder", "Json", "child", "decode", "encode", "pickled"]

logger = logging.getLogger(__name__)

_FACTORIES: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        bool,
        bytearray,
        bytes,
        complex,
        dict,
        float,
        frozenset,
        int,
        list,
        set,
        str,
        tuple,
    )
}
_warned: set[tuple[str, str]] = set()


def encode(value: object, path: str, into: Encoder) -> Json:
    """The document of a value whose key path is `path`.

    Arrays and pickles go to `into.blob`, and so may share memory with the value until staged.

    Raises:
        UnsupportedState: a value contains itself, is nested too deeply, or cannot be pickled.
    """
    try:
        return Writing(into, _WRITERS, _write_other, _write_pickle).value(value, path)
    except RecursionError as error:
        raise too_deep(path) from error


def decode(document: Json, source: Decoder, path: str = "") -> object:
    """The value of a document, which may have come from anyone.

    Raises:
        PickleRefused: it holds pickled values and `source.allow_pickle` is False; lists them all.
        FormatError: it is not a document that `encode` makes, or names a class not loaded here.
    """
    if not source.allow_pickle:
        values = _pickled(document, path)
        if values:
            raise PickleRefused(where=shown(path), values=values)
    try:
        return Reading(source, _READERS).value(document, path)
    except RecursionError as error:
        raise FormatError(file=shown(path), reason="is nested too deeply") from error


def pickled(document: Json) -> list[str]:
    """Key path and type of every pickled value in a document, in order.

    Raises:
        FormatError: the document is nested deeper than any that `encode` makes.
    """
    return _pickled(document, "")


def _pickled(document: Json, path: str) -> list[str]:
    found = []
    waiting = [(document, path, 0)]
    while waiting:
        node, place, level = waiting.pop()
        if type(node) is list:
            inside = [(item, child(place, index)) for index, item in enumerate(node)]
        elif type(node) is dict:
            if "$pickle" in node:
                kind = node.get("type")
                found.append(f"{shown(place)} ({kind[:200] if type(kind) is str else 'unknown'})")
            inside = list(_inside(node, place))
        else:
            continue
        if inside and level > 2 * MAX_LEVELS:
            raise FormatError(file=shown(path), reason="is nested too deeply")
        waiting += [(item, at, level + 1) for item, at in reversed(inside)]
    return found


def _inside(node: dict[str, Json], path: str) -> Iterator[tuple[Json, str]]:
    tagged = any(type(key) is str and key[:1] == "$" for key in node)
    for key, item in node.items():
        if not tagged:
            yield item, child(path, key)
        elif key in _PAIR_FIELDS and type(item) is list:
            for pair in item:
                known = type(pair) is list and len(pair) == 2 and type(pair[0]) in (str, int)
                yield pair[1] if known else pair, child(path, pair[0]) if known else path
        else:
            yield item, path


_PAIR_FIELDS = frozenset(
    ["$dict", "$odict", "$defaultdict", "$counter", "$namespace", "$simple_namespace", "items"]
)


def _write_dict(walk: Writing, value: dict[Any, Any], path: str) -> Json:
    for key in value:
        if type(key) is not str or key[:1] == "$" or not (key.isascii() or is_plain(key)):
            return {"$dict": walk.pairs(value, value.items(), path)}
    walk.enter(value, path, 1)
    prefix = f"{path}." if path else ""
    one = walk.value
    document = {key: one(item, prefix + key) for key, item in value.items()}
    walk.leave(value)
    return document


def _write_defaultdict(walk: Writing, value: defaultdict[Any, Any], path: str) -> Json:
    factory: Any = value.default_factory
    name = getattr(factory, "__name__", None)
    if factory is None:
        document = None
    elif type(name) is str and _FACTORIES.get(name) is factory:
        document = name
    else:
        document = _write_pickle(walk, factory, child(path, "default_factory"))
    return {"$defaultdict": walk.pairs(value, value.items(), path), "factory": document}


def _read_defaultdict(walk: Reading, document: dict[str, Json], path: str) -> object:
    factory: Any = document["factory"]
    if type(factory) is str:
        factory = _FACTORIES[factory]
    elif type(factory) is dict and "$pickle" in factory:
        factory = walk.value(factory, child(path, "default_factory"))
    elif factory is not None:
        walk.refuse(path, "a defaultdict with another kind of factory")
    return defaultdict(factory, walk.pairs(document["$defaultdict"], path))


def _read_counter(walk: Reading, document: dict[str, Json], path: str) -> object:
    value: Counter[Any] = Counter()
    dict.update(value, walk.pairs(document["$counter"], path))
    return value


def _write_deque(walk: Writing, value: deque[Any], path: str) -> Json:
    return {"$deque": walk.values(value, value, path), "maxlen": value.maxlen}


def _read_deque(walk: Reading, document: dict[str, Json], path: str) -> object:
    maxlen = document["maxlen"]
    values = walk.values(document["$deque"], path)
    if maxlen is not None and (type(maxlen) is not int or maxlen < len(values)):
        walk.refuse(path, "a deque that is longer than it may be")
    return deque(values, maxlen)


def _write_set(walk: Writing, value: set[Any] | frozenset[Any], path: str) -> Json:
    documents = walk.values(value, value, path)
    return {f"${type(value).__name__}": sorted(documents, key=sort_key)}


def _read_set(walk: Reading, document: dict[str, Json], path: str) -> object:
    ((mark, items),) = document.items()
    found: dict[object, None] = {}
    values = walk.values(items, path)
    for value in values:
        walk.hashed(found.__setitem__, value, path)
    if len(found) != len(values):
        walk.refuse(path, "a set with one value twice")
    return set(found) if mark == "$set" else frozenset(found)


def _write_slice(walk: Writing, value: slice, path: str) -> Json:
    return {"$slice": walk.values(value, (value.start, value.stop, value.step), path)}


def _read_slice(walk: Reading, document: dict[str, Json], path: str) -> object:
    start, stop, step = walk.values(document["$slice"], path)
    return slice(start, stop, step)


def _write_other(walk: Writing, value: Any, path: str) -> Json:
    """A value whose very class is in no table."""
    kind = type(value)
    write = classes.write_by_class(kind)
    if write is None and isinstance(value, np.generic):
        write = arrays.write_scalar
    if write is None and "omegaconf" in sys.modules:
        write = configs.write_by_class(kind)
    return (write or _write_pickle)(walk, value, path)


def _write_pickle(walk: Writing, value: object, path: str) -> Json:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        data = bytearray(pickle.dumps(value, protocol=4))
    except Exception as error:  # whatever a class's own hooks raise, it comes to the same
        raise UnsupportedState(
            key=shown(path),
            what=f"a {kind} that pickle refuses too ({type(error).__name__}: {error})"[:400],
            remedy="leave it out, or give it state_dict() and load_state_dict()",
        ) from error
    if (path, kind) not in _warned:
        _warned.add((path, kind))
        logger.warning(
            "%s is a %s, which is saved by pickle: loading it needs allow_pickle=True",
            shown(path),
            kind,
        )
    return {"$pickle": walk.blob(path, np.frombuffer(data, np.uint8)), "type": kind}


def _read_pickle(walk: Reading, document: dict[str, Json], path: str) -> object:
    kind = walk.text(document["type"], path)
    if not walk.source.allow_pickle:
        raise PickleRefused(where=shown(path), values=[f"{shown(path)} ({kind[:200]})"])
    data = scalars.read_blob_bytes(walk, document["$pickle"], path)
    try:
        return pickle.loads(data)  # noqa: S301 - allow_pickle was asked for
    except Exception as error:  # unpickling runs whatever the pickle says, which may raise anything
        raise FormatError(
            file=shown(path),
            reason=f"its pickled {kind[:200]} cannot be read ({type(error).__name__}: {error})"[
                :600
            ],
        ) from error


_WRITERS: dict[type, Write] = {
    **scalars.WRITERS,
    **arrays.WRITERS,
    **classes.WRITERS,
    dict: _write_dict,
    list: lambda walk, value, path: walk.values(value, value, path, 1),
    tuple: lambda walk, value, path: {"$tuple": walk.values(value, value, path)},
    OrderedDict: lambda walk, value, path: {"$odict": walk.pairs(value, value.items(), path)},
    Counter: lambda walk, value, path: {"$counter": walk.pairs(value, value.items(), path)},
    defaultdict: _write_defaultdict,
    deque: _write_deque,
    set: _write_set,
    frozenset: _write_set,
    slice: _write_slice,
}

_READERS: dict[str, Tag] = {
    **scalars.READERS,
    **arrays.READERS,
    **classes.READERS,
    **configs.READERS,
    "$tuple": tag(lambda walk, document, path: tuple(walk.values(document["$tuple"], path))),
    "$dict": tag(lambda walk, document, path: dict(walk.pairs(document["$dict"], path))),
    "$odict": tag(lambda walk, document, path: OrderedDict(walk.pairs(document["$odict"], path))),
    "$defaultdict": tag(_read_defaultdict, "factory"),
    "$counter": tag(_read_counter),
    "$deque": tag(_read_deque, "maxlen"),
    "$set": tag(_read_set),
    "$frozenset": tag(_read_set),
    "$slice": tag(_read_slice),
    "$pickle": tag(_read_pickle, "type"),
}
