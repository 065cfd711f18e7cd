"""Where generations go, and what their folders are called.

Knows paths and the project's configuration. Knows nothing of what a folder holds.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from accelerate_ckpt.plugin import CheckpointPlugin
from accelerate_ckpt.stock import StockFolder
from torch_ckpt import ConfigError

logger = logging.getLogger(__name__)


def default_root(accelerator: Any, plugin: CheckpointPlugin) -> str:
    """The root of the plugin, or else the folder in which stock Accelerate numbers its saves.

    Raises:
        ConfigError: neither is known.
    """
    if plugin.root is not None:
        text = os.fspath(plugin.root)
    elif accelerator.project_dir is not None:
        text = os.path.join(accelerator.project_dir, "checkpoints")
    else:
        raise ConfigError(
            "accelerate_ckpt does not know where to save: give CheckpointPlugin(root=...), "
            "ACCELERATE_CKPT_ROOT, --ckpt_root, or the Accelerator a project_dir"
        )
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def generation_name(
    configuration: Any, folder: str | os.PathLike[str] | None, root: str
) -> str | None:
    """The name of a generation's folder under the root; None for the engine's own.

    Raises:
        ConfigError: it names no folder, or one that stock Accelerate wrote.
    """
    if configuration is not None and configuration.automatic_checkpoint_naming:
        name: str | None = f"checkpoint_{configuration.iteration}"
    elif folder is None:
        name = None
    else:
        name = os.fspath(folder).rstrip("/").rpartition("/")[2]
        if name in ("", ".", ".."):
            raise ConfigError(f"output_dir must name a folder, got {os.fspath(folder)!r}")
    if name and configuration is not None and "://" not in root:
        stock = StockFolder.at(Path(root, name))
        if stock is not None:
            raise ConfigError(
                f"{stock.path} holds a checkpoint that stock Accelerate wrote; load it, move it, "
                "or save under another root"
            )
    return name


def name_to_load(folder: str, root: str) -> str | None:
    """The name under the root of what `load_state` is given, which is what `save_state` was given.

    Only the last part of a folder counts, wherever it would lie; so one that is there, and is a
    generation of another run, is not mistaken for that of this run which has the same name.

    Raises:
        ConfigError: it names no folder, or a generation under another root.
    """
    name = generation_name(None, folder, root)
    parent, ours = folder.rstrip("/").rpartition("/")[0], root.rstrip("/")
    if "://" in folder:
        if parent != ours:
            logger.warning(
                "%s is looked for as %s/%s, since the root is %s", folder, ours, name, ours
            )
        return name
    path = Path(folder).expanduser()
    here = None if "://" in root else Path(root, str(name))
    if not (path / "manifest.json").is_file() or (
        here is not None and here.exists() and here.samefile(path)
    ):
        return name
    raise ConfigError(
        f"{path} is a generation of another root than {root}; to go on with it, attach with "
        f"CheckpointPlugin(root={str(path.absolute().parent)!r}), or ACCELERATE_CKPT_ROOT"
    )


def result_path(root: str, folder: str) -> Any:
    """What `save_state` returns: where the generation will be."""
    return f"{root.rstrip('/')}/{folder}" if "://" in root else Path(root, folder)
