"""What DCP's `checkpoint_id` means here: a step, or the folder of a generation under the root.

Knows names, paths and URLs. Knows nothing of stores.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from torch_ckpt.config import check_step
from torch_ckpt.errors import ConfigError
from torch_ckpt.manifest.layout import folder_name
from torch_ckpt.storage.spelling import same_place

_STEP = re.compile(r"step[-_=]?(\d+)(?!\d)")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The generation that an id names: by its folder, or by its step alone."""

    folder: str | None
    step: int | None


def parse_checkpoint_id(checkpoint_id: object, root: str) -> Wanted:
    """What an id names under a root.

    - A whole number, or text that is one, is a step.
    - A name is a folder of the root; its step is the number after "step" (`step-500`,
      `epoch=3-step=700.ckpt`), or else the only number in it.
    - A path or URL is such a folder, spelt in full: it must lie directly in the root.

    Raises:
        ConfigError: it is none of these, or lies elsewhere.
    """
    if isinstance(checkpoint_id, int):
        return Wanted(None, check_step(checkpoint_id))
    if not isinstance(checkpoint_id, (str, os.PathLike)):
        raise ConfigError(f"checkpoint_id must be a step, a name or a path, got {checkpoint_id!r}")
    text = os.fspath(checkpoint_id).rstrip("/")
    if text.isdecimal() and text.isascii():
        return Wanted(None, check_step(int(text)))
    parent, slash, name = text.rpartition("/")
    if name in ("", ".", "..") or not name.isprintable():
        raise ConfigError(f"checkpoint_id must name a folder, got {checkpoint_id!r}")
    if slash and not same_place(parent or "/", root):
        raise ConfigError(
            f"checkpoint_id {text!r} is not a folder directly in the root {root!r}; "
            "give the step or the folder's name alone, or open that folder's parent as the root"
        )
    return Wanted(name, _step_in(name))


def to_write(wanted: Wanted) -> tuple[str, int]:
    """The folder and the step of a generation to be written.

    Raises:
        ConfigError: the id does not say the step.
    """
    if wanted.step is None:
        raise ConfigError(
            f"checkpoint_id {wanted.folder!r} does not say its step; name it like 'step-500'"
        )
    return wanted.folder or folder_name(wanted.step), wanted.step


def _step_in(name: str) -> int | None:
    found = _STEP.findall(name) or _NUMBER.findall(name)
    return check_step(int(found[-1])) if len(set(found)) == 1 and len(found[-1]) < 20 else None
