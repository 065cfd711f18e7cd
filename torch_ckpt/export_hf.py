"""The way out to Hugging Face: one generation as the folder that a `Trainer` writes.

Stock `from_pretrained` and stock `resume_from_checkpoint` read it. Every byte is verified on the
way. Knows generations and the files of such a folder. Imports no framework.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from torch_ckpt.errors import ConfigError
from torch_ckpt.export import Exported, to_safetensors
from torch_ckpt.export_folder import lay_out, new_folder, python_and_numpy, size_of
from torch_ckpt.load import Opened, load_fresh
from torch_ckpt.staging.documents import names_in

_KEY = "transformers"
_MODEL = "model"


def to_hf(
    opened: Opened, path: Path, *, force: bool = False, allow_pickle: bool = False
) -> Exported:
    """Write a generation that a `Trainer` saved as a folder for stock Transformers.

    Raises:
        ConfigError: it holds no state of a Trainer.
        PickleRefused: it holds pickled values and `allow_pickle` is False.
        FileExistsError: there is something under that name and `force` is False.
    """
    tree = opened.tree
    if not isinstance(tree, dict) or not {_KEY, _MODEL, "optimizer", "rank"} <= tree.keys():
        keys = ", ".join(list(tree)[:6]) if isinstance(tree, dict) else "no dict"
        raise ConfigError(
            f"{opened.generation.url} holds no state of a Hugging Face Trainer (its state: "
            f"{keys}); export it to safetensors"
        )
    tied: dict[str, str] = {}
    with new_folder(path, force=force) as beside:
        weights = _weights_of(tree[_KEY])
        if weights is not None:
            tied = dict(to_safetensors(opened, beside / weights, only=f"{_MODEL}.").tied)
        opened.tree = {key: value for key, value in tree.items() if key != _MODEL}
        first = load_fresh(opened, rank=0, allow_pickle=allow_pickle)
        _write(beside, first)
        ranks = len(opened.parts)
        opened.tree = {"rank": tree["rank"]}
        for rank in range(ranks):
            own = load_fresh(opened, rank=rank, allow_pickle=allow_pickle)["rank"]
            own = getattr(own, "value", own)
            lay_out(own["files"], beside)
            name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
            torch.save(_random(own["random"], alone=ranks == 1), beside / name)
    opened.tree = tree
    return Exported(path=path, bytes=size_of(path), tensors=len(names_in(tree)), tied=tied)


def _weights_of(header: Any) -> str | None:
    """The file for the model's tensors; None where they are among the files already."""
    name = header.get("weights") if isinstance(header, dict) else None
    if name is not None and (not isinstance(name, str) or Path(name).name != name):
        raise ConfigError(f"the file for weights, {name!r}, would not be in the folder")
    return name


def _write(folder: Path, state: dict[str, Any]) -> None:
    """Everything but the model and what each rank has for itself."""
    for name in ("optimizer", "scheduler", "scaler"):
        if name in state:
            torch.save(state[name], folder / f"{name}.pt")
    trainer_state = json.loads(state[_KEY]["trainer_state"])
    trainer_state["best_model_checkpoint"] = None  # it is a generation, which stock cannot read
    text = json.dumps(trainer_state, indent=2, sort_keys=True) + "\n"
    (folder / "trainer_state.json").write_text(text, encoding="utf-8")


def _random(saved: dict[str, Any], *, alone: bool) -> dict[str, Any]:
    """A rank's random state as the Trainer names it."""
    python, numpy = python_and_numpy(saved)
    found = {"python": python, "numpy": numpy, "cpu": torch.as_tensor(saved["torch"])}
    if saved.get("cuda"):
        states = [torch.as_tensor(one) for one in saved["cuda"]]
        found["cuda"] = states[0] if alone else states
    return found
