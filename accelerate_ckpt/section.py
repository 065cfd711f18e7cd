"""The `ckpt_config:` section of an Accelerate configuration file, or a file of its own.

Stock `accelerate launch` refuses a file with a section that it does not know. So a file with ours
is for `accelerate-ckpt launch`, which gives the rest of it to Accelerate; whoever starts with both
keeps the section in a second file.

Knows YAML and the plugin's fields. Knows nothing of launching.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from accelerate_ckpt.plugin import PREFIX, CheckpointPlugin
from torch_ckpt import ConfigError

KEY = "ckpt_config"
FIELDS = tuple(one.name for one in fields(CheckpointPlugin))


def read_document(path: Path) -> dict[str, Any]:
    """A configuration file, YAML or JSON.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is no mapping of names to values")
    return document


def split(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What is Accelerate's, and our section if there is one."""
    rest = {name: value for name, value in document.items() if name != KEY}
    section = document.get(KEY)
    return rest, None if section is None else dict(section)


def read_section(path: Path) -> dict[str, Any]:
    """A file of our own: the section's fields, with or without the line `ckpt_config:` above."""
    document = read_document(path)
    _, section = split(document)
    return document if section is None else section


def environment(values: Mapping[str, Any], *, where: str) -> dict[str, str]:
    """The variables that say the same as a section.

    Raises:
        ConfigError: it has a field that there is not, or a value that cannot be used.
    """
    names = {name.removeprefix("ckpt_"): name for name in values}
    for name in names:
        if name not in FIELDS:
            known = ", ".join(FIELDS)
            raise ConfigError(f"{where} has {names[name]!r}; the fields are {known}")
    given = {name: values[key] for name, key in names.items() if values[key] is not None}
    found = {PREFIX + name.upper(): _text(value) for name, value in given.items()}
    CheckpointPlugin(**given)  # refuses bad values now
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, Mapping) else os.fspath(str(value))
