"""Ways in which the files of a generation go bad.

Knows files. Knows nothing of the engine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

Damage = Callable[[Path], None]


def flip(offset: int, bit: int = 0) -> Damage:
    """Turn one bit over; a negative offset counts from the end."""

    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1 << bit
        path.write_bytes(data)

    return change


def offsets(path: Path) -> Iterator[int]:
    """Where to flip: the ends, the middle, and a spread in between."""
    size = path.stat().st_size
    wanted = {0, 1, 8, 40, size // 3, size // 2, 4095, 4096, 4100, 8191, 8192, size - 2, size - 1}
    yield from sorted(offset for offset in wanted if 0 <= offset < size)


def truncate(keep: float) -> Damage:
    """Cut a file short."""

    def change(path: Path) -> None:
        os.truncate(path, int(path.stat().st_size * keep))

    return change


def append(path: Path) -> None:
    """Make a file longer."""
    with path.open("ab") as file:
        file.write(b"\0")


def delete(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def zero(path: Path) -> None:
    """Replace every byte by zero: what a lost write looks like."""
    path.write_bytes(bytes(path.stat().st_size))


def become_link(path: Path) -> None:
    """Put a symbolic link to the very same bytes in the place of a file."""
    moved = path.parent.parent / f"moved-{path.name}"
    shutil.move(path, moved)
    path.symlink_to(moved)


def become_pipe(path: Path) -> None:
    """Put a pipe that nobody writes to in the place of a file."""
    path.unlink()
    os.mkfifo(path)


def become_folder(path: Path) -> None:
    """Put a folder in the place of a file."""
    path.unlink()
    path.mkdir()


def swap(one: Path, other: Path) -> None:
    """Exchange two files."""
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
