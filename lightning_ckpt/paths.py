"""Checkpoint paths as Lightning hands them over: strings, `Path`s, URLs, links, broken URLs.

Knows strings and local links. Knows nothing of what a path holds.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePath

from fsspec.core import split_protocol

TIER_OPTIONS = (
    "archive",
    "cache",
    "keep_archive",
    "permanent_every",
    "archive_options",
    "archive_timeout_s",
    "bandwidth_limit",
)
"""Options of the engine that say where checkpoints go on to."""

_ONE_SLASH = re.compile(r"^([a-z][a-z0-9+.-]+):/(?=[^/])")
_WHOLE = {"file": "file:///", "local": "local:///"}


def as_url(path: str | os.PathLike[str]) -> str:
    """A path as text; a URL that went through `Path` gets its second slash back."""
    text = os.fspath(path)
    if isinstance(path, PurePath):  # Lightning #21775: sharded strategies make a Path of a URL
        text = _ONE_SLASH.sub(lambda found: _WHOLE.get(found[1], f"{found[1]}://"), text)
    return text if is_remote(text) else os.path.abspath(os.path.expanduser(_plain(text)))


def as_text(path: str | os.PathLike[str]) -> str:
    """A path as it was given, but for a URL that went through `Path`."""
    return as_url(path) if isinstance(path, PurePath) else os.fspath(path)


def is_remote(url: str) -> bool:
    """Whether a path is a URL of something else than this host's file system."""
    return split_protocol(url)[0] not in (None, "file", "local")


def split(url: str) -> tuple[str, str]:
    """The run's root and the name of the generation's folder, of one checkpoint path."""
    root, _, name = url.rstrip("/").rpartition("/")
    return root or "/", name


def resolved(url: str) -> str:
    """What a local link points to (`save_last="link"`), anything else as it is."""
    return os.path.realpath(url) if not is_remote(url) and os.path.islink(url) else url


def is_scratch(url: str) -> bool:
    """Whether Lightning made up the name for itself.

    Names with a leading dot are read back by another process (`ddp_spawn`) or at once (tuner),
    and removed: `.temp.ckpt`, `.lr_find_*.ckpt`, `.scale_batch_size_*.ckpt`.
    """
    return split(url)[1].startswith(".")


def _plain(text: str) -> str:
    protocol, rest = split_protocol(text)
    return rest if protocol else text
