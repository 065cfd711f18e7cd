"""One pass over a value or over its document: where it is, how deep, and what it meets.

Knows paths, depth, cycles and the look-up of who handles what.
Knows no tag and no Python type by name; those are in the files that register them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import numpy as np

from torch_ckpt.errors import CkptError, FormatError, UnsupportedState

Json = Any
"""A value that JSON can hold."""

MAX_LEVELS = 200
"""Arrays and objects inside each other in one document; parts are refused from 256 on."""

MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What constructors of the standard library, numpy and torch raise for arguments they refuse."""


class Encoder(Protocol):
    """Takes what is not JSON."""

    def leaf(self, path: str, value: object, /) -> Json | None:
        """The document of a value that the caller stores itself; None: not such a value."""
        ...

    def blob(self, path: str, data: np.ndarray, /) -> str:
        """Keep a C-contiguous, writable array until it is staged; return its entry's name."""
        ...


class Decoder(Protocol):
    """Gives back what is not JSON."""

    allow_pickle: bool

    def leaf(self, tag: str, document: dict[str, Json], /) -> object:
        """The value of a document whose tag is not one of the registered ones."""
        ...

    def blob(self, name: str, /) -> np.ndarray:
        """The array that was kept under `name`, for the caller to own."""
        ...


def is_plain(text: str) -> bool:
    """Whether JSON gives `text` back as it is: two halves of a surrogate pair would merge."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def child(path: str, key: object) -> str:
    """The key path of what `key` names inside `path`: "model.weight", "groups.0"; the root is "".

    Two keys can share a path ("1" and 1), so a path is no identity.
    """
    if type(key) is str:
        name = key if is_plain(key) else key.encode(errors="backslashreplace").decode()
    elif type(key) is int:
        name = str(key) if abs(key) < 1 << 64 else hex(key)
    elif key is None or isinstance(key, bool | float):
        name = str(key)
    else:
        name = f"<{type(key).__qualname__}>"
    return f"{path}.{name}" if path else name


def shown(path: str) -> str:
    """A key path, short enough for a message."""
    if not path:
        return "the state"
    return path if len(path) <= 200 else f"{path[:140]}...{path[-50:]}"


Write = Callable[["Writing", Any, str], Json]
Read = Callable[["Reading", dict[str, Json], str], object]


@dataclass(frozen=True, slots=True)
class Tag:
    """How a tagged object is read, and which fields it must and may carry beside its tag."""

    read: Read
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


def tag(read: Read, required: str = "", optional: str = "") -> Tag:
    """A `Tag` whose fields are given as words."""
    return Tag(read, frozenset(required.split()), frozenset(optional.split()))


class Writing:
    """Values on their way into a document."""

    __slots__ = ("_levels", "_open", "_other", "_pickle", "_writers", "blob", "leaf")

    def __init__(
        self, into: Encoder, writers: Mapping[type, Write], other: Write, pickle: Write
    ) -> None:
        self.leaf, self.blob, self._pickle = into.leaf, into.blob, pickle
        self._writers, self._other = writers, other
        self._open: dict[int, int] = {}
        self._levels = 0

    def value(self, value: object, path: str) -> Json:
        """The document of any value."""
        document = self.leaf(path, value)
        if document is not None:
            return document
        return self._writers.get(type(value), self._other)(self, value, path)

    def pickle(self, value: object, path: str) -> Json:
        """The document of a value that only pickle can keep."""
        return self._pickle(self, value, path)

    def enter(self, value: object, path: str, levels: int) -> None:
        """Open a container whose contents lie that many JSON levels below it."""
        if id(value) in self._open:
            raise UnsupportedState(
                key=shown(path),
                what=f"a {type(value).__qualname__} that contains itself",
                remedy="save a tree, without references back up",
            )
        self._levels += levels
        if self._levels > MAX_LEVELS:
            raise too_deep(path)
        self._open[id(value)] = levels

    def leave(self, value: object) -> None:
        """Close the container that was opened last."""
        self._levels -= self._open.pop(id(value))

    def values(self, owner: object, items: Iterable[object], path: str, levels: int = 2) -> Json:
        """An array of documents, the contents of `owner`."""
        self.enter(owner, path, levels)
        prefix = f"{path}." if path else ""
        value = self.value
        documents = [value(item, f"{prefix}{index}") for index, item in enumerate(items)]
        self.leave(owner)
        return documents

    def pairs(self, owner: object, items: Iterable[tuple[object, object]], path: str) -> Json:
        """An array of [key, value] documents, the contents of `owner`, in order."""
        self.enter(owner, path, 3)
        documents = []
        for key, item in items:
            place = child(path, key)
            documents.append([self.value(key, place), self.value(item, place)])
        self.leave(owner)
        return documents


def too_deep(path: str) -> UnsupportedState:
    """The refusal of a value that is nested without end, or nearly so."""
    return UnsupportedState(
        key=shown(path),
        what="nested too deeply",
        remedy=f"documents hold at most {MAX_LEVELS} levels; flatten it",
    )


@dataclass(slots=True)
class Reading:
    """Documents on their way back into values; nothing in them is believed before it is checked."""

    source: Decoder
    tags: Mapping[str, Tag]
    _levels: int = field(default=0, init=False)

    def value(self, document: Json, path: str) -> object:
        """The value of any document."""
        kind = type(document)
        if kind is str or kind is int or kind is float or kind is bool or document is None:
            return document
        if kind is not dict and kind is not list:
            self.refuse(path, f"a {kind.__qualname__} is not JSON")
        self._levels += 1
        if self._levels > MAX_LEVELS:
            self.refuse(path, f"it is nested more than {MAX_LEVELS} deep")
        try:
            if kind is list:
                return self.values(document, path)
            marks = [key for key in document if type(key) is not str or key[:1] == "$"]
            if marks:
                return self._tagged(marks, document, path)
            return {key: self.value(item, child(path, key)) for key, item in document.items()}
        finally:
            self._levels -= 1

    def _tagged(self, marks: list[str], document: dict[str, Json], path: str) -> object:
        mark = marks[0]
        if len(marks) != 1 or type(mark) is not str:
            self.refuse(path, f"an object with the tags {marks[:4]!r}")
        known = self.tags.get(mark)
        if known is not None:
            fields = document.keys() - {mark}
            if not known.required <= fields <= known.required | known.optional:
                self.refuse(path, f"a {mark} with the fields {sorted(fields)[:8]!r}")
        try:
            if known is None:
                return self.source.leaf(mark, document)
            return known.read(self, document, path)
        except CkptError:
            raise
        except MALFORMED as error:
            text = f"{type(error).__name__}: {error}"
            raise FormatError(
                file=shown(path), reason=f"a malformed {mark[:40]} ({text[:200]})"
            ) from error

    def values(self, documents: Json, path: str) -> list[object]:
        """The values of an array of documents."""
        if type(documents) is not list:
            self.refuse(path, "something else where an array should be")
        return [self.value(item, child(path, index)) for index, item in enumerate(documents)]

    def pairs(self, documents: Json, path: str) -> list[tuple[object, object]]:
        """The keys and values of an array of [key, value], all keys different."""
        if type(documents) is not list:
            self.refuse(path, "something else where an array of pairs should be")
        found: dict[object, object] = {}
        pairs = []
        for pair in documents:
            if type(pair) is not list or len(pair) != 2:
                self.refuse(path, "something else where a pair of key and value should be")
            key = self.value(pair[0], child(path, "key"))
            pairs.append((key, self.value(pair[1], child(path, key))))
            self.hashed(found.__setitem__, key, path)
        if len(found) != len(pairs):
            self.refuse(path, "a key that comes twice")
        return pairs

    def hashed(self, insert: Callable[[Any, None], None], key: object, path: str) -> None:
        """Call `insert(key, None)`, which hashes and compares a value made from a document."""
        try:
            insert(key, None)
        except Exception as error:  # a class of the user's may raise anything from its __hash__
            raise FormatError(
                file=shown(path), reason=f"a key of type {type(key).__qualname__} has no hash"
            ) from error

    def text(self, document: Json, path: str) -> str:
        """A string that is JSON's own, not a tagged one."""
        if type(document) is not str:
            self.refuse(path, "something else where a string should be")
        return document

    def blob(self, name: Json, path: str) -> np.ndarray:
        """The array of a tensor entry, writable."""
        data = self.source.blob(self.text(name, path))
        return data if data.flags.writeable else data.copy()

    def refuse(self, path: str, reason: str) -> NoReturn:
        """Stop: the document cannot have been written by this package."""
        raise FormatError(file=shown(path), reason=f"its document holds {reason}")


def sort_key(document: Json) -> str:
    """An order of documents that is the same in every process."""
    return json.dumps(document, sort_keys=True)
