"""The way out to Accelerate: one generation as the folder that `Accelerator.save_state` writes.

Every byte is verified on the way. Knows generations and the files of such a folder. Imports no
framework.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torch_ckpt.errors import ConfigError
from torch_ckpt.export import Exported, to_safetensors
from torch_ckpt.export_folder import lay_out, new_folder, python_and_numpy, size_of
from torch_ckpt.load import Opened, load_fresh
from torch_ckpt.staging.documents import names_in

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


def _nth(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name
