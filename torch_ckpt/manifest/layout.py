"""The names of everything in a run's folder, and which of them may be trusted.

Knows names. Knows nothing of stores or documents.
"""

from __future__ import annotations

import re

from torch_ckpt.errors import FormatError

MANIFEST = "manifest.json"
LATEST = "LATEST"
INDEX = "INDEX.json"
"""Summaries of the manifests of a remote root, so that listing it takes few requests."""
RUN = "RUN.json"
"""Which run an archive belongs to."""
NOTE_LIMIT_BYTES = 4096
"""What is longer is neither `LATEST` nor `RUN.json`."""

_OURS = re.compile(
    r"rank-[0-9]{5,}\.(?P<attempt>[0-9a-f]{8})\.(safetensors|blocks|json|failed)(\.[0-9a-f]+\.tmp)?"
    r"|manifest\.json\.[0-9a-f]+\.tmp"
)
_FOLDER = re.compile(r"step-(\d{10,})(-[0-9a-f]{8})?")


def folder_name(step: int) -> str:
    """The folder of a step, padded so that names sort as steps do."""
    return f"step-{step:010d}"


def step_of_folder(name: str) -> int | None:
    """The step in a folder name of ours, None for any other name."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def shard_name(rank: int, attempt: str, *, encoded: bool = False) -> str:
    """The file of one rank's blocks: plain safetensors unless it is encoded."""
    return f"rank-{rank:05d}.{attempt}.{'blocks' if encoded else 'safetensors'}"


def part_name(rank: int, attempt: str) -> str:
    """The JSON document of one rank, which is also its vote for the commit."""
    return f"rank-{rank:05d}.{attempt}.json"


def refusal_name(rank: int, attempt: str) -> str:
    """The note of a rank that will not vote, so that nobody waits for it."""
    return f"rank-{rank:05d}.{attempt}.failed"


def is_ours(name: str) -> bool:
    """Whether a file name inside a generation folder can only have been made by a save."""
    return _OURS.fullmatch(name) is not None


def attempt_of(name: str) -> str | None:
    """The attempt in a file name of ours, None if it carries none."""
    match = _OURS.fullmatch(name)
    return match["attempt"] if match else None


def is_begun(name: str) -> bool:
    """Whether a file of ours has a temporary name: whatever its size, its bytes are not there."""
    return name.endswith(".tmp")


def check_name(name: str, *, file: str) -> str:
    """Return `name` if it is a plain file name; `file` is the document that carries it.

    Raises:
        FormatError: it is empty, has a folder in it, or could leave its generation's folder.
    """
    unsafe = any(char in name for char in "/\\\0:") or not name.isprintable()
    if not name or name in {".", ".."} or unsafe:
        raise FormatError(file=file, reason=f"names {name!r}, which is not a plain file name")
    return name
