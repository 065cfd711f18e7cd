"""Ordinary `.ckpt` files: written whole and durable before return, read as Lightning reads them.

Used where a generation would be wrong: Lightning's scratch files, saves in a signal handler, and
saves after the trainer has ended. Knows `torch.save` and file systems. Knows nothing of
generations.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem


def is_file(path: str) -> bool:
    """Whether there is an ordinary file at a path or URL."""
    filesystem, name = url_to_fs(path)
    return filesystem.isfile(name)


def write_file(checkpoint: dict[str, Any], path: str) -> None:
    """`torch.save` to a path or URL; on return the file is there, whole and durable."""
    filesystem, name = url_to_fs(path)
    if isinstance(filesystem, LocalFileSystem):
        _write_local(checkpoint, Path(name))
        return
    filesystem.makedirs(os.path.dirname(name), exist_ok=True)
    with filesystem.open(name, "wb") as file:  # object stores show a file once it is complete
        torch.save(checkpoint, file)


def remove_file(path: str) -> None:
    """Remove an ordinary file; one that is not there is fine."""
    filesystem, name = url_to_fs(path)
    if filesystem.isfile(name):
        filesystem.rm_file(name)


def _write_local(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: a rename between file systems would not be atomic, and /tmp may be small.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
