"""What `torch.save` wrote, read back without running what is in it unless the user allows that.

Knows `torch.load` and which classes are only data. Knows nothing of what the values are for.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import pathlib
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from torch_ckpt.errors import ConfigError, FormatError, PickleRefused
from torch_ckpt.foreign.arrays import STAND_INS, NotPlain, named, rebuilt

_GLOBAL = re.compile(r"(?:[Uu]nsupported (?:global: )?(?:GLOBAL|class)) (\S+)")
_REASON = re.compile(r"WeightsUnpickler error:\s*(.+)")
_CHUNK_BYTES = 4 << 20


def _no_bytes() -> bytes:
    """How a pickle makes bytes of length 0; of a number it would make as many as that says."""
    return b""


_SAFE: list[Any] = [
    *STAND_INS,
    named(_no_bytes, "builtins", "bytes"),
    *(
        named(kind, home, kind.__name__)
        for home in ("pathlib", "pathlib._local")
        for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
    ),
    *(bool, dict, float, int, list, str, tuple),
    argparse.Namespace,
]
"""Classes that are data, beside those of torch's own list."""

_MAX_LEAVES = 10_000_000
_MAX_DEPTH = 200
_SLACK_BYTES = 64 << 20
_TIMES = 8
"""Tensors may share and repeat stored bytes; beyond this they only exhaust memory."""


def load_file(path: pathlib.Path, *, allow_pickle: bool) -> Any:
    """The value in a file of `torch.save`; its tensors are views of the file.

    Raises:
        PickleRefused: it holds classes that are not only data, which are named.
        FormatError: it is cut short, or `torch.save` did not write it.
        ConfigError: unpickling was allowed, and a class cannot be imported.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:  # an error of the file itself has its own words
        archive = file.read(4) == b"PK\x03\x04"
    return _load(str(path), str(path), os.path.getsize(path), archive, allow_pickle=allow_pickle)


def load_bytes(data: bytes, where: str, *, allow_pickle: bool) -> Any:
    """The value in the bytes of `torch.save`; `where` names them in errors, which are the same."""
    return _load(io.BytesIO(data), where, len(data), True, allow_pickle=allow_pickle)


def leaves(state: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Key path and value of all that is no container, in order; empty containers count.

    Raises:
        FormatError: it is nested without end.
    """
    waiting = [("", state, 0)]
    for _ in range(_MAX_LEAVES):
        if not waiting:
            return
        path, value, depth = waiting.pop()
        if isinstance(value, Mapping):
            items = list(value.items())
        elif isinstance(value, (list, tuple)):
            items = list(enumerate(value))
        elif type(value) is argparse.Namespace:
            items = list(vars(value).items())
        else:
            items = []
        if depth > _MAX_DEPTH:
            raise FormatError(file=where, reason=f"{path[:80]} is nested too deeply")
        if not items:
            yield path, value
        waiting += [
            (f"{path}.{key}" if path else f"{key}", item, depth + 1) for key, item in items[::-1]
        ]
    raise FormatError(file=where, reason="it holds too many values")


def _load(
    file: str | io.BytesIO, where: str, stored_bytes: int, archive: bool, *, allow_pickle: bool
) -> Any:
    mmap = archive and isinstance(file, str)
    try:
        if archive:
            _check_archive(file, where)
        with safe_globals(_SAFE):
            value = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        _check_size(value, stored_bytes, where)  # first: it also finds what has no end
        return rebuilt(value)
    except FormatError:
        raise
    except (pickle.UnpicklingError, NotPlain) as error:
        refused = [str(error)] if isinstance(error, NotPlain) else _unsafe(file, error)
        if archive and not refused:  # its checksums are right, so it is no damage
            refused = _REASON.findall(str(error))[:1]
        if not refused:
            raise _unreadable(where, error) from error
        if not allow_pickle:
            raise PickleRefused(where=where, values=refused) from error
    except Exception as error:  # torch raises almost anything for bytes that are not its own
        raise _unreadable(where, error) from error
    try:
        if isinstance(file, io.BytesIO):
            file.seek(0)
        # By the user's word, and only for what could not be read without.
        value = torch.load(file, map_location="cpu", weights_only=False, mmap=mmap)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{where} cannot be unpickled here ({error}); run this where its classes can be "
            "imported"
        ) from error
    except Exception as error:  # code of the user's own
        raise _unreadable(where, error) from error
    _check_size(value, stored_bytes, where)
    return value


def _check_archive(file: str | io.BytesIO, where: str) -> None:
    """Refuse an archive that would grow, since `torch.save` compresses nothing, or is damaged.

    Torch itself does not look at the checksums.
    """
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        if any(info.filename.endswith("/constants.pkl") for info in infos):
            raise FormatError(file=where, reason="is a TorchScript program, no checkpoint")
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise FormatError(file=where, reason=f"{info.filename!r} in it is compressed")
            if info.CRC == 0:  # what torch writes where `set_crc32_options(False)` was called
                continue
            with archive.open(info) as member:
                while member.read(_CHUNK_BYTES):
                    pass
    if isinstance(file, io.BytesIO):
        file.seek(0)


def _unsafe(file: str | io.BytesIO, error: Exception) -> list[str]:
    """The classes for which reading was refused."""
    try:
        if isinstance(file, io.BytesIO):
            file.seek(0)
        with safe_globals(_SAFE):
            found = set(get_unsafe_globals_in_checkpoint(file))
    except Exception:  # older files are no archives; then only the first is known
        found = set()
    return sorted(found) or _GLOBAL.findall(str(error))[:1]


def _unreadable(where: str, error: Exception) -> FormatError:
    text = next(iter(_REASON.findall(str(error))), str(error).strip())
    text = f"{type(error).__name__}: {text.partition(chr(10))[0].partition('. ')[0][:200]}"
    return FormatError(
        file=where, reason=f"is damaged, cut short, or not what torch.save writes ({text})"
    )


def _check_size(value: Any, stored_bytes: int, where: str) -> None:
    """Refuse tensors that are far larger than the bytes that they are made from."""
    total = 0
    seen = set()
    for path, leaf in leaves(value, where):
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
            continue
        place = (leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.shape)
        if leaf.is_meta or place in seen:
            continue
        seen.add(place)
        total += math.prod(leaf.shape) * leaf.element_size()
        if total > _TIMES * stored_bytes + _SLACK_BYTES:
            raise FormatError(
                file=where,
                reason=f"{path} and what is before it come to {total} bytes, "
                f"and {stored_bytes} are stored",
            )
