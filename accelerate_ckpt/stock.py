"""Folders that stock `Accelerator.save_state` wrote: found, checked, and loaded by its own code.

Such a folder has no mark of completeness and its reader passes over what is missing; so whatever
this Accelerator would need is looked for first. Knows file names. Knows nothing of generations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    load,
)
from typing_extensions import Self

from torch_ckpt import CkptError

_NUMBERED = re.compile(r"checkpoint_(\d+)")


class StockIncomplete(CkptError, ValueError):
    """A folder of stock Accelerate lacks something that this Accelerator needs."""


@dataclass(frozen=True)
class StockFolder:
    """One such folder."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> Self | None:
        """The folder at a path, if stock Accelerate wrote it."""
        if (path / "manifest.json").exists() or not path.is_dir():
            return None
        return cls(path) if list(path.glob(f"{RNG_STATE_NAME}_*.pkl")) else None

    @classmethod
    def numbered(cls, root: Path) -> list[Self]:
        """Those under a root, newest first by number; what else lies there is passed over."""
        paths = [path for path in root.glob("checkpoint_*") if _NUMBERED.fullmatch(path.name)]
        found = [folder for path in paths if (folder := cls.at(path)) is not None]
        return sorted(found, key=lambda one: one.number, reverse=True)

    @property
    def number(self) -> int:
        """What automatic naming counted it as; -1 for a name of another kind."""
        found = _NUMBERED.fullmatch(self.path.name)
        return int(found[1]) if found else -1

    def check(self, accelerator: Any) -> None:
        """Make sure that all that this Accelerator needs is there.

        Raises:
            StockIncomplete: something is missing, or another number of ranks saved it.
        """
        ranks = len(list(self.path.glob(f"{RNG_STATE_NAME}_*.pkl")))
        if ranks != accelerator.num_processes:
            raise StockIncomplete(
                f"{self.path} holds random states of {ranks} ranks, and this job has "
                f"{accelerator.num_processes}: a rank's file is missing, or another number of "
                "ranks saved it; load it on as many ranks, and save it as a generation to change "
                "their number"
            )
        missing = [name for name in self._needed(accelerator) if not self._has(name)]
        if missing:
            raise StockIncomplete(
                f"{self.path} lacks {', '.join(missing)}, so it is incomplete or was saved by "
                "another program; load an earlier one"
            )
        for rank in range(ranks):  # all of them, so that every rank comes to the same end
            random = self.path / f"{RNG_STATE_NAME}_{rank}.pkl"
            try:
                load(random)
            except Exception as error:  # stock code would go on without, whatever it is
                raise StockIncomplete(f"{random} cannot be read: {error}") from error

    def optimizer_steps(self, accelerator: Any) -> int:
        """Steps taken, as the first optimizer counts them; 0 if it does not."""
        for one in accelerator._optimizers[:1]:
            states = one.state.values()
            return max((int(state.get("step", 0)) for state in states), default=0)
        return 0

    def _needed(self, accelerator: Any) -> list[str]:
        names = [f"{RNG_STATE_NAME}_{rank}.pkl" for rank in range(accelerator.num_processes)]
        if not accelerator._load_model_state_pre_hook and not accelerator.is_fsdp2:
            names += [_nth(SAFE_MODEL_NAME, n) for n in range(len(accelerator._models))]
        if not accelerator.is_fsdp2:
            names += [_nth(OPTIMIZER_NAME, n) + ".bin" for n in range(len(accelerator._optimizers))]
        names += [_nth(SCHEDULER_NAME, n) + ".bin" for n in range(len(accelerator._schedulers))]
        names += [f"custom_checkpoint_{n}.pkl" for n in range(len(accelerator._custom_objects))]
        return names + ([SCALER_NAME] if accelerator.scaler is not None else [])

    def _has(self, name: str) -> bool:
        if name.startswith(SAFE_MODEL_NAME) and "." not in name:
            binary = name.replace(SAFE_MODEL_NAME, MODEL_NAME, 1)
            return self._has(f"{name}.safetensors") or self._has(f"{binary}.bin")
        return (self.path / name).is_file()


def _nth(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name
