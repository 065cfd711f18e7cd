"""A folder of a training framework's own layout: whole and durable, or not there.

Knows files and the random states of `RngState`. Knows nothing of generations or of who reads it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from torch_ckpt.errors import ConfigError
from torch_ckpt.storage.durable import sync_folder


@contextmanager
def new_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """A folder that appears under `path` whole and durable when the body is done, or not at all.

    Raises:
        FileExistsError: there is something under that name and `force` is False.
    """
    if os.path.lexists(path) and not force:
        raise FileExistsError(errno.EEXIST, "exists; choose another name, or --force", str(path))
    path = path.absolute()
    beside = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    beside.mkdir()
    try:
        yield beside
        _durable(beside)
        if force and os.path.lexists(path):
            _away(path)
        os.rename(beside, path)
        sync_folder(str(path.parent))
    finally:
        with suppress(OSError):
            shutil.rmtree(beside)


def size_of(folder: Path) -> int:
    """Bytes in the files of a folder."""
    return sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())


def lay_out(files: Mapping[str, Any], folder: Path) -> None:
    """Write files that were saved byte for byte.

    Raises:
        ConfigError: one would not be in the folder.
    """
    for name, data in files.items():
        target = folder / name
        if folder.resolve() not in target.resolve().parents:
            raise ConfigError(f"a file that was saved, {name!r}, would leave the folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        np.asarray(data, dtype=np.uint8).tofile(target)


def python_and_numpy(saved: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What `random.setstate` and `numpy.random.set_state` take, from a state of `RngState`."""
    python, numpy = saved["python"], saved["numpy"]
    return (
        (python["version"], tuple(int(word) for word in python["internal"]), python["gauss"]),
        (
            numpy["kind"],
            np.asarray(numpy["keys"], dtype=np.uint32),
            numpy["position"],
            numpy["has_gauss"],
            numpy["cached"],
        ),
    )


def _durable(folder: Path) -> None:
    for item in folder.rglob("*"):
        descriptor = os.open(item, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(str(folder))


def _away(path: Path) -> None:
    """Make room; the new folder is complete by now."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
