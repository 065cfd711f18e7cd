"""The way out to Accelerate: one generation as the folder that `Accelerator.save_state` writes.

Every byte is verified on the way. Knows generations and the files of such a folder. Imports no
framework.
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
import torch

from torch_ckpt.errors import ConfigError
from torch_ckpt.export import Exported, to_safetensors
from torch_ckpt.load import Opened, load_fresh
from torch_ckpt.staging.documents import names_in
from torch_ckpt.storage.durable import sync_folder

_KEY = "accelerate"


def to_accelerate(
    opened: Opened, path: Path, *, force: bool = False, allow_pickle: bool = False
) -> Exported:
    """Write a generation that an Accelerator saved as a folder for stock `load_state`.

    Raises:
        ConfigError: it holds no state of an Accelerator.
        PickleRefused: it holds pickled values and `allow_pickle` is False.
        FileExistsError: there is something under that name and `force` is False.
    """
    tree = opened.tree
    if not isinstance(tree, dict) or not {_KEY, "models", "rank"} <= tree.keys():
        keys = ", ".join(list(tree)[:6]) if isinstance(tree, dict) else "no dict"
        raise ConfigError(
            f"{opened.generation.url} holds no state of an Accelerator (its state: {keys}); "
            "export it to safetensors"
        )
    with new_folder(path, force=force) as beside:
        for number in sorted(tree["models"]):
            name = _nth("model", int(number)) + ".safetensors"
            to_safetensors(opened, beside / name, only=f"models.{number}.")
        states = [
            load_fresh(opened, rank=rank, allow_pickle=allow_pickle)
            for rank in range(len(opened.parts))
        ]
        _write(beside, states)
    return Exported(path=path, bytes=size_of(path), tensors=len(names_in(tree)), tied={})


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


def _write(folder: Path, states: list[dict[str, Any]]) -> None:
    """Everything but the models, which are not read twice."""
    first = states[0]
    for kind, stem in (("optimizers", "optimizer"), ("schedulers", "scheduler")):
        for number, state in enumerate(first[kind]):
            torch.save(state, folder / f"{_nth(stem, number)}.bin")
    if "scaler" in first:
        torch.save(first["scaler"], folder / "scaler.pt")
    for rank, state in enumerate(states):
        own = _own(state)
        random = {"step": first[_KEY]["step"], **_random(own["random"])}
        torch.save(random, folder / f"random_states_{rank}.pkl")
        lay_out(own["files"], folder)
    for number, place in enumerate(_own(first)["places"]["loaders"]):
        if place is not None and place["own"] is not None:
            torch.save(place["own"], folder / f"{_nth('dl_state_dict', number)}.bin")
    for number, state in enumerate(first["custom"]):
        torch.save(state, folder / f"custom_checkpoint_{number}.pkl")


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


def _own(state: dict[str, Any]) -> dict[str, Any]:
    """What one rank has for itself."""
    return getattr(state["rank"], "value", state["rank"])


def _random(saved: dict[str, Any]) -> dict[str, Any]:
    """A rank's random state as Accelerate names it."""
    python, numpy = python_and_numpy(saved)
    found = {
        "random_state": python,
        "numpy_random_seed": numpy,
        "torch_manual_seed": torch.as_tensor(saved["torch"]),
    }
    if saved.get("cuda"):
        found["torch_cuda_manual_seed"] = [torch.as_tensor(one) for one in saved["cuda"]]
    return found


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


def _nth(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name
