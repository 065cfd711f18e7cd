"""Hooks of `register_save_state_pre_hook` and `register_load_state_pre_hook`.

A hook writes files into the checkpoint's folder, and takes out of `weights` what is saved by that.
A generation has no folder that others may write to; so hooks get an empty one, and what they leave
there becomes part of the generation, verified and tiered like the rest. To load, the files of all
ranks are laid out again, as in the folder that all ranks would have shared.

Knows hooks and files. Knows nothing of storage.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from accelerate_ckpt.wrappers import unwrapped
from torch_ckpt import ConfigError


class Files:
    """The files that hooks of this rank have written."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = dict(state)

    def reshard_state_dict(self, states: Any, rank: int, world_size: int) -> dict[str, Any]:
        """Everything, on rank 0."""
        held = {name: data for state in states for name, data in state.items()}
        return held if rank == 0 else {}

    def collect(self, folder: Path) -> None:
        """Take what lies in a folder."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.held[path.relative_to(folder).as_posix()] = np.fromfile(path, dtype=np.uint8)

    def lay_out(self, folder: Path, accelerator: Any) -> None:
        """Write the files of all ranks into a folder of this rank's own."""
        everyone = [self.held]
        if accelerator.num_processes > 1:
            everyone = gather_object(everyone)
        for held in everyone:
            for name, data in held.items():
                path = folder / name
                if folder not in path.resolve().parents:
                    raise ConfigError(f"a hook's file {name!r} would leave its folder")
                path.parent.mkdir(parents=True, exist_ok=True)
                np.asarray(data, dtype=np.uint8).tofile(path)


def run_save_hooks(accelerator: Any, files: Files) -> dict[str, Any]:
    """Ask the hooks; the weights that they leave to be saved, by number of model."""
    weights = [unwrapped(model).state_dict() for model in accelerator._models]
    numbers = {id(one): str(number) for number, one in enumerate(weights)}
    with _folder() as folder:
        for hook in accelerator._save_model_state_pre_hook.values():
            hook(accelerator._models, weights, str(folder))
        files.collect(folder)
    kept: dict[str, Any] = {}
    for place, one in enumerate(weights):
        kept[numbers.get(id(one), str(place))] = one
    return kept


def run_load_hooks(accelerator: Any, files: Files) -> list[Any]:
    """Ask the hooks, which may load what a generation holds as files; the models they leave."""
    models = list(accelerator._models)
    with _folder() as folder:
        files.lay_out(folder, accelerator)
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(models, str(folder))
    return models


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="accelerate-ckpt-")).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
