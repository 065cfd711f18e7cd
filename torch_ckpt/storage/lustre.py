"""Striping of generation folders on Lustre: over how many storage targets a shard is spread.

Knows the mounts table and the `lfs` command. Knows nothing of what is stored. Nothing here is
needed for a save to be right: whatever fails costs speed and one warning.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch_ckpt.errors import ConfigError

logger = logging.getLogger(__name__)

MOUNTS = "/proc/self/mounts"
"""Where the kernel tells which file systems are mounted; Linux only."""

_STRIPE_UNIT = 1 << 16
_STRIPE_BYTES = 16 << 20
_BY_SIZE = ("-E 1G -c 1", f"-E 100G -c 4 -S {_STRIPE_BYTES}", f"-E -1 -c 8 -S {_STRIPE_BYTES}")
"""Where nothing is asked for: each file gets more stripes as it grows (a progressive layout).

So small documents stay on one target and shards of any size get theirs, and all ranks of a save ask
for the same, whatever their shares are.
"""
_LFS_S = 30.0
_TARGET = re.compile(r"l_ost_idx:\s*(\d+)|^\s+(\d+)\s+\d+\s+0x[0-9a-f]+\s", re.MULTILINE)
"""In what `lfs getstripe` prints of growing layouts, and in its table of plain ones."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Striping:
    """What new files in a generation folder are told; None leaves it to their size."""

    stripe_count: int | None = None
    """Storage targets for one file; -1 is all of them."""

    stripe_size: int | None = None
    """Bytes on one target before the next one comes; a multiple of 64 KiB."""

    def __post_init__(self) -> None:
        count, size = self.stripe_count, self.stripe_size
        if count is not None and (not _is_int(count) or not (count == -1 or count >= 1)):
            raise ConfigError(f"stripe_count must be 1 or more, or -1 for all; got {count!r}")
        if size is not None and (not _is_int(size) or size < 1 or size % _STRIPE_UNIT):
            raise ConfigError(f"stripe_size must be a multiple of 65536 bytes, got {size!r}")

    @property
    def words(self) -> list[str]:
        """The options of `lfs setstripe`."""
        if self.stripe_count is None and self.stripe_size is None:
            return " ".join(_BY_SIZE).split()
        words = ["-S", str(self.stripe_size or _STRIPE_BYTES)]
        return words if self.stripe_count is None else ["-c", str(self.stripe_count), *words]


OPTIONS = tuple(field.name for field in fields(Striping))
"""The storage options that a local path takes."""


def striping_from(url: str, storage_options: Mapping[str, Any] | None) -> Striping:
    """The striping that storage options of a local path ask for.

    Raises:
        ConfigError: they ask for something else, or for what Lustre cannot do.
    """
    options = dict(storage_options or {})
    if others := sorted(options.keys() - set(OPTIONS)):
        raise ConfigError(
            f"{url} is a local path, which takes no storage_options; drop {', '.join(others)}"
        )
    return Striping(**options)


class Stripes:
    """Sets one striping on the folders of one root; does nothing where that is not on Lustre."""

    def __init__(self, striping: Striping) -> None:
        self._words = striping.words
        self._on_lustre: bool | None = None
        self._last: str | None = None

    def set_on(self, folder: str) -> None:
        """Tell a folder that exists how files made in it from now on are striped; never raises.

        Every rank says it, also where another one has made the folder: its first file must not be
        made before.
        """
        if self._on_lustre is None:
            self._on_lustre = is_on_lustre(folder)
        if self._on_lustre and folder != self._last:
            self._last = folder
            _set(folder, self._words)


def is_on_lustre(path: str) -> bool:
    """Whether a path that exists is on a mounted Lustre, as the kernel's table says."""
    try:
        lines = Path(MOUNTS).read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError:  # no Linux
        return False
    if not any(" lustre " in line for line in lines):
        return False
    path = os.path.join(os.path.realpath(path), "")
    longest, kind = "", ""
    for words in (line.split(" ") for line in lines):
        if len(words) < 3:
            continue
        mounted, found = words[1:3]
        mounted = os.path.join(_ESCAPED.sub(lambda code: chr(int(code[1], 8)), mounted), "")
        if path.startswith(mounted) and len(mounted) >= len(longest):  # a later one lies above
            longest, kind = mounted, found
    return kind == "lustre"


def targets_under(folder: str) -> list[int]:
    """The storage targets (OSTs) on which files of a folder lie; none where that is not Lustre.

    Asks the metadata server alone, so a target that is stuck does not keep it from answering.
    """
    if not is_on_lustre(folder):
        return []
    try:
        told = _lfs("getstripe", folder)
    except _LfsFailed as failure:
        logger.debug("on which targets %s lies is not known: %s", folder, failure)
        return []
    return sorted({int(found[1] or found[2]) for found in _TARGET.finditer(told)})


def _set(folder: str, words: list[str]) -> None:
    try:
        _lfs("setstripe", *words, folder)
    except _LfsFailed as failure:
        _complain(folder, str(failure))


class _LfsFailed(Exception):
    """Why `lfs` did not do what it was asked."""


def _lfs(*words: str) -> str:
    """What `lfs` prints."""
    import subprocess  # a writer that is not on Lustre starts without it

    try:
        done = subprocess.run(
            ["lfs", *words],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LFS_S,
        )
    except FileNotFoundError:
        raise _LfsFailed("there is no `lfs` on the path") from None
    except (OSError, subprocess.TimeoutExpired, UnicodeError) as error:
        raise _LfsFailed(str(error)) from error
    if done.returncode:
        raise _LfsFailed(done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout


_said = False


def _complain(folder: str, reason: str) -> None:
    """Once a process: it will be the same for every generation."""
    global _said
    if not _said:
        _said = True
        logger.warning(
            "%s keeps the default striping of its file system, which may be slower (%s); "
            "`lfs setstripe` on the root by hand does as well",
            folder,
            reason,
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
