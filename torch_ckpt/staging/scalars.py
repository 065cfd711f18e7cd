"""Values without parts: numbers, text, bytes, moments, paths, and torch's small types.

Knows how each is spelled in a document. Knows nothing of containers, classes or arrays.
"""

from __future__ import annotations

import base64
import math
import pathlib
import re
import struct
import zoneinfo
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from types import NoneType
from typing import Any
from uuid import UUID

import numpy as np
import torch

from torch_ckpt.staging.walk import Json, Reading, Tag, Write, Writing, is_plain, tag

INLINE_BYTES = 256
"""Longer byte strings are stored as tensor entries."""

MAX_INT_DIGITS = 1 << 20
"""Hexadecimal digits of the largest integer in a document."""

MAX_FRACTION_DIGITS = 1 << 14
"""The same for fractions, whose gcd takes quadratic time."""

_HEX = re.compile(r"-?0x(0|[1-9a-f][0-9a-f]*)")
_ZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_NAN = struct.pack(">d", math.nan)
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _torch_names(kind: type) -> dict[str, Any]:
    found = [value for value in vars(torch).values() if type(value) is kind]
    return {str(value).removeprefix("torch."): value for value in found}


_TORCH: dict[str, dict[str, Any]] = {
    "$dtype": _torch_names(torch.dtype),
    "$layout": _torch_names(torch.layout),
    "$memory_format": _torch_names(torch.memory_format),
}
_PATHS = {
    kind.__name__: kind
    for kind in (
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.PosixPath,
        pathlib.WindowsPath,
    )
}


def write_native(_walk: Writing, value: object, _path: str) -> Json:
    """None and bool are themselves."""
    return value


def write_int(walk: Writing, value: int, path: str) -> Json:
    """Integers of up to 64 bits are themselves; others are hexadecimal, read in linear time."""
    if -(1 << 63) <= value < 1 << 64:
        return value
    if value.bit_length() > 4 * MAX_INT_DIGITS:
        return walk.pickle(value, path)
    return {"$int": hex(value)}


def read_int(walk: Reading, document: Json, path: str, limit: int = MAX_INT_DIGITS) -> int:
    """An integer, plain or in hexadecimal."""
    if type(document) is int:
        return document
    text = document["$int"] if type(document) is dict and len(document) == 1 else None
    if type(text) is not str or len(text) > limit + 3 or not _HEX.fullmatch(text):
        walk.refuse(path, "something else where an integer should be")
    return int(text, 16)


def write_float(_walk: Writing, value: float, _path: str) -> Json:
    """Finite floats are themselves; a NaN of the usual bits is "nan", any other shows its bits."""
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    return {"$float": str(value) if value == value or bits == _NAN else bits.hex()}


def read_float(walk: Reading, document: Json, path: str) -> float:
    """A float, finite or not."""
    if type(document) is float:
        return document
    text = document["$float"] if type(document) is dict and len(document) == 1 else None
    if type(text) is str and text in _FLOATS:
        return _FLOATS[text]
    bits = bytes.fromhex(text) if type(text) is str and len(text) == 16 else b""
    value = struct.unpack(">d", bits)[0] if len(bits) == 8 else 0.0
    if value == value:
        walk.refuse(path, "something else where a float should be")
    return value


def write_str(_walk: Writing, value: str, _path: str) -> Json:
    """Text is itself unless JSON would not give it back."""
    if value.isascii() or is_plain(value):
        return value
    return {"$str": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}


def read_str(walk: Reading, document: Json, path: str) -> str:
    """Text, plain or with lone surrogates."""
    if type(document) is not dict or len(document) != 1:
        return walk.text(document, path)
    return unpacked(document["$str"]).decode("utf-8", "surrogatepass")


def unpacked(text: Json) -> bytes:
    """The bytes of base64 text."""
    return base64.b64decode(text, validate=True)


def _write_complex(walk: Writing, value: complex, path: str) -> Json:
    return {"$complex": [write_float(walk, value.real, path), write_float(walk, value.imag, path)]}


def _read_complex(walk: Reading, document: dict[str, Json], path: str) -> complex:
    real, imaginary = document["$complex"]
    return complex(read_float(walk, real, path), read_float(walk, imaginary, path))


def _write_bytes(walk: Writing, value: bytes | bytearray, path: str) -> Json:
    mark = f"${type(value).__name__}"
    if len(value) <= INLINE_BYTES:
        return {mark: base64.b64encode(value).decode()}
    return {f"{mark}_blob": walk.blob(path, np.frombuffer(bytearray(value), np.uint8))}


def read_blob_bytes(walk: Reading, name: Json, path: str) -> memoryview:
    """The bytes of a tensor entry that holds nothing else."""
    data = walk.blob(name, path)
    if data.dtype != np.uint8 or data.ndim != 1:
        walk.refuse(path, f"bytes whose entry is {data.dtype} with {data.ndim} dimensions")
    return np.ascontiguousarray(data).data


def _write_range(walk: Writing, value: range, path: str) -> Json:
    parts = (value.start, value.stop, value.step)
    return {"$range": [write_int(walk, part, path) for part in parts]}


def _read_range(walk: Reading, document: dict[str, Json], path: str) -> range:
    start, stop, step = (read_int(walk, part, path) for part in document["$range"])
    return range(start, stop, step)


def _write_fraction(walk: Writing, value: Fraction, path: str) -> Json:
    parts = (value.numerator, value.denominator)
    if max(part.bit_length() for part in parts) > 4 * MAX_FRACTION_DIGITS:
        return walk.pickle(value, path)
    return {"$fraction": [write_int(walk, part, path) for part in parts]}


def _read_fraction(walk: Reading, document: dict[str, Json], path: str) -> Fraction:
    over, under = (
        read_int(walk, part, path, MAX_FRACTION_DIGITS) for part in document["$fraction"]
    )
    return Fraction(over, under)


def _write_datetime(walk: Writing, value: datetime, path: str) -> Json:
    parts = [value.year, value.month, value.day]
    parts += [value.hour, value.minute, value.second, value.microsecond]
    return {"$datetime": parts, "fold": value.fold, "zone": _write_zone(walk, value.tzinfo, path)}


def _write_time(walk: Writing, value: time, path: str) -> Json:
    parts = [value.hour, value.minute, value.second, value.microsecond]
    return {"$time": parts, "fold": value.fold, "zone": _write_zone(walk, value.tzinfo, path)}


def _write_zone(walk: Writing, zone: tzinfo | None, path: str) -> Json:
    return None if zone is None else walk.value(zone, path)


def _read_datetime(walk: Reading, document: dict[str, Json], path: str) -> datetime:
    zone: Any = walk.value(document["zone"], path)
    year, month, day, *clock = document["$datetime"]
    return datetime(year, month, day, *clock, tzinfo=zone, fold=document["fold"])


def _read_time(walk: Reading, document: dict[str, Json], path: str) -> time:
    zone: Any = walk.value(document["zone"], path)
    return time(*document["$time"], tzinfo=zone, fold=document["fold"])


def _write_timedelta(_walk: Writing, value: timedelta, _path: str) -> Json:
    return {"$timedelta": [value.days, value.seconds, value.microseconds]}


def _write_timezone(walk: Writing, value: timezone, path: str) -> Json:
    given = value.__getinitargs__()  # type: ignore[attr-defined]  # offset, and the name if any
    offset = given[0]
    name = write_str(walk, given[1], path) if len(given) > 1 else None
    return {"$timezone": [offset.days, offset.seconds, offset.microseconds], "name": name}


def _read_timezone(walk: Reading, document: dict[str, Json], path: str) -> timezone:
    offset = timedelta(*document["$timezone"])
    if document["name"] is None:
        return timezone(offset)
    return timezone(offset, read_str(walk, document["name"], path))


def _write_zoneinfo(walk: Writing, value: zoneinfo.ZoneInfo, path: str) -> Json:
    if value.key is None or not _ZONE.fullmatch(value.key):
        return walk.pickle(value, path)
    return {"$zoneinfo": value.key}


def _read_zoneinfo(walk: Reading, document: dict[str, Json], path: str) -> zoneinfo.ZoneInfo:
    key = walk.text(document["$zoneinfo"], path)
    if not _ZONE.fullmatch(key):  # a key is looked for in folders and in the tzdata package
        walk.refuse(path, "a time zone with another kind of name")
    return zoneinfo.ZoneInfo(key)


def _write_path(walk: Writing, value: pathlib.PurePath, path: str) -> Json:
    return {"$path": write_str(walk, str(value), path), "kind": type(value).__name__}


def _read_path(walk: Reading, document: dict[str, Json], path: str) -> pathlib.PurePath:
    kind = _PATHS[walk.text(document["kind"], path)]
    if issubclass(kind, pathlib.Path) and kind is not type(pathlib.Path()):
        kind = kind.__mro__[2]  # the other system's: its pure kind is all that can exist here
    return kind(read_str(walk, document["$path"], path))


def _write_torch(mark: str) -> Write:
    return lambda _walk, value, _path: {mark: str(value).removeprefix("torch.")}


def _read_torch(walk: Reading, document: dict[str, Json], path: str) -> object:
    ((mark, name),) = document.items()
    return _TORCH[mark][walk.text(name, path)]


def _write_size(walk: Writing, value: torch.Size, path: str) -> Json:
    if not all(type(length) is int for length in value):
        return walk.pickle(value, path)
    return {"$size": list(value)}


def _read_size(walk: Reading, document: dict[str, Json], path: str) -> torch.Size:
    lengths = document["$size"]
    if type(lengths) is not list or not all(type(length) is int for length in lengths):
        walk.refuse(path, "something else where lengths should be")
    return torch.Size(lengths)


WRITERS: Mapping[type, Write] = {
    NoneType: write_native,
    bool: write_native,
    int: write_int,
    float: write_float,
    str: write_str,
    complex: _write_complex,
    bytes: _write_bytes,
    bytearray: _write_bytes,
    range: _write_range,
    Decimal: lambda _walk, value, _path: {"$decimal": str(value)},
    Fraction: _write_fraction,
    UUID: lambda _walk, value, _path: {"$uuid": value.hex},
    datetime: _write_datetime,
    date: lambda _walk, value, _path: {"$date": value.isoformat()},
    time: _write_time,
    timedelta: _write_timedelta,
    timezone: _write_timezone,
    zoneinfo.ZoneInfo: _write_zoneinfo,
    **dict.fromkeys(_PATHS.values(), _write_path),
    torch.dtype: _write_torch("$dtype"),
    torch.layout: _write_torch("$layout"),
    torch.memory_format: _write_torch("$memory_format"),
    torch.device: lambda _walk, value, _path: {"$device": str(value)},
    torch.Size: _write_size,
}

READERS: Mapping[str, Tag] = {
    "$int": tag(read_int),
    "$float": tag(read_float),
    "$str": tag(read_str),
    "$complex": tag(_read_complex),
    "$bytes": tag(lambda _walk, document, _path: unpacked(document["$bytes"])),
    "$bytearray": tag(lambda _walk, document, _path: bytearray(unpacked(document["$bytearray"]))),
    "$bytes_blob": tag(
        lambda walk, document, path: bytes(read_blob_bytes(walk, document["$bytes_blob"], path))
    ),
    "$bytearray_blob": tag(
        lambda walk, document, path: bytearray(
            read_blob_bytes(walk, document["$bytearray_blob"], path)
        )
    ),
    "$range": tag(_read_range),
    "$decimal": tag(lambda walk, document, path: Decimal(walk.text(document["$decimal"], path))),
    "$fraction": tag(_read_fraction),
    "$uuid": tag(lambda walk, document, path: UUID(hex=walk.text(document["$uuid"], path))),
    "$datetime": tag(_read_datetime, "fold zone"),
    "$date": tag(
        lambda walk, document, path: date.fromisoformat(walk.text(document["$date"], path))
    ),
    "$time": tag(_read_time, "fold zone"),
    "$timedelta": tag(lambda _walk, document, _path: timedelta(*document["$timedelta"])),
    "$timezone": tag(_read_timezone, "name"),
    "$zoneinfo": tag(_read_zoneinfo),
    "$path": tag(_read_path, "kind"),
    **dict.fromkeys(_TORCH, tag(_read_torch)),
    "$device": tag(lambda walk, document, path: torch.device(walk.text(document["$device"], path))),
    "$size": tag(_read_size),
}
