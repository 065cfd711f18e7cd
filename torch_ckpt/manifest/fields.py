"""One field of a document: a value of the type that it must have, or a refusal that names it.

Every function raises FormatError; `file` is the document, for the message. Knows JSON values.
Knows nothing of which fields a document has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from torch_ckpt.errors import FormatError

MAX_NUMBER = 1 << 62
"""Steps, sizes and offsets stay below this, so that sums of a few fit 64 bits."""


def refuse(file: str, reason: str) -> NoReturn:
    """Raise what a reader says of a document that it will not use."""
    raise FormatError(file=file, reason=reason)


def short(value: object) -> str:
    """A value as a message quotes it."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def number(
    doc: Mapping[str, Any], key: str, file: str, *, low: int = 0, high: int = MAX_NUMBER
) -> int:
    """A whole number from `low` to below `high`."""
    value = doc[key]
    if type(value) is not int or not low <= value < high:
        refuse(file, f"{key} is {short(value)}, not a whole number from {low} to {high - 1}")
    return value


def text(doc: Mapping[str, Any], key: str, file: str) -> str:
    """A string."""
    value = doc[key]
    if type(value) is not str:
        refuse(file, f"{key} is {short(value)}, not a string")
    return value


def matched(doc: Mapping[str, Any], key: str, pattern: re.Pattern[str], file: str) -> str:
    """A string of a form."""
    value = text(doc, key, file)
    if pattern.fullmatch(value) is None:
        refuse(file, f"{key} is {short(value)}, which does not match {pattern.pattern}")
    return value


def array(doc: Mapping[str, Any], key: str, file: str) -> list[Any]:
    """An array."""
    value = doc[key]
    if type(value) is not list:
        refuse(file, f"{key} is {short(value)}, not an array")
    return value


def mapping(doc: Mapping[str, Any], key: str, file: str) -> dict[str, Any]:
    """An object."""
    value = doc[key]
    if type(value) is not dict:
        refuse(file, f"{key} is {short(value)}, not an object")
    return value


def texts(doc: Mapping[str, Any], key: str, file: str) -> dict[str, str]:
    """An object of strings."""
    value = mapping(doc, key, file)
    for name, text in value.items():
        if type(text) is not str:
            refuse(file, f"{key}[{short(name)}] is {short(text)}, not a string")
    return value
