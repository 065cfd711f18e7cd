"""OmegaConf containers in documents, for programs that use OmegaConf.

The library is never imported here: who has such a value has loaded it.
Knows its public functions. Knows nothing of other values.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from torch_ckpt.errors import FormatError
from torch_ckpt.staging.walk import Json, Reading, Tag, Write, Writing, shown, tag

_PLAIN = (str, int, float, bool, bytes, type(None), Path, Enum)


def write_by_class(kind: type) -> Write | None:
    """Who writes the instances of an OmegaConf class; None for any other class."""
    library: Any = sys.modules["omegaconf"]
    known = (getattr(library, "DictConfig", None), getattr(library, "ListConfig", None))
    return _write_config if kind in known else None


def _is_plain(content: object) -> bool:
    """Whether OmegaConf makes plain nodes of it: instances and classes become typed ones."""
    if type(content) is dict:
        return all(_is_plain(item) for pair in content.items() for item in pair)
    if type(content) is list:
        return all(_is_plain(item) for item in content)
    return isinstance(content, _PLAIN)


def _write_config(walk: Writing, value: Any, path: str) -> Json:
    library: Any = sys.modules["omegaconf"].OmegaConf
    content = library.to_container(value, resolve=False)
    if not _is_plain(content) or not isinstance(content, dict | list) or _is_typed(library, value):
        return walk.pickle(value, path)
    walk.enter(value, path, 1)
    document = {
        "$omegaconf": walk.value(content, path),
        "readonly": library.is_readonly(value),
        "struct": library.is_struct(value),
    }
    walk.leave(value)
    return document


def _is_typed(library: Any, value: object) -> bool:
    """Whether any node inside has the type of a structured config, which a container lacks."""
    if library.is_config(value):
        if library.get_type(value) not in (dict, list, None):
            return True
        keys = value.keys() if hasattr(value, "keys") else range(len(value))  # type: ignore[arg-type]
        return any(_is_typed(library, value._get_node(key)) for key in keys)  # type: ignore[attr-defined]
    return False


def _read_config(walk: Reading, document: dict[str, Json], path: str) -> object:
    module = sys.modules.get("omegaconf")
    if module is None:
        raise FormatError(
            file=shown(path), reason="holds an OmegaConf container; import omegaconf before loading"
        )
    library: Any = module.OmegaConf
    content = walk.value(document["$omegaconf"], path)
    flags = (document["readonly"], document["struct"])
    if not isinstance(content, dict | list) or not _is_plain(content):
        walk.refuse(path, "an OmegaConf container of other values")
    if not all(flag is None or type(flag) is bool for flag in flags):
        walk.refuse(path, "an OmegaConf container with other flags")
    value = library.create(content)
    library.set_readonly(value, flags[0])
    library.set_struct(value, flags[1])
    return value


READERS: Mapping[str, Tag] = {
    "$omegaconf": tag(_read_config, "readonly struct"),
}
