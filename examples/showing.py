"""What the demos have in common: a folder of their own, a line a part, and one way to end.

Knows terminals and folders. Knows nothing of jobs or checkpoints.
"""

from __future__ import annotations

import argparse
import fcntl
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torch_ckpt import CkptError


class DemoFailed(Exception):
    """The demo cannot go on; the message says why, and is all that is shown."""


class Display:
    """One line a part: a bar on a terminal, plain text otherwise."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._bars = console.is_terminal and not console.is_dumb_terminal
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._bars,
        )
        self._part = self.progress.add_task("", total=steps, visible=False)

    def begin(self, text: str) -> None:
        """A new part."""
        if not self._bars:
            self._console.print(f"{text} ...")
        self._part = self.progress.add_task(text, total=self._steps)

    def show(self, step: int) -> None:
        """How far this part is."""
        self.progress.update(self._part, completed=step)


def fresh_folder(folder: Path, mark: str) -> IO[str]:
    """An empty folder in the place of an earlier demo's, and never of anything else.

    The open file holds a lock: no other demo takes the folder while somebody has it.

    Raises:
        DemoFailed: something else is there, or another demo runs in it.
    """
    marked = folder / mark
    if folder.is_symlink() or (folder.exists() and not marked.is_file()):
        raise DemoFailed(
            f"{folder} was not made by this demo; move it away, or run in another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    lock = marked.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DemoFailed(f"another demo is running in {folder.resolve()}") from None
    for path in folder.iterdir():
        if path.name != mark:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return lock


def parser_for(text: str, *, steps: int, seed: str, folder: str) -> argparse.ArgumentParser:
    """The options that every demo has; `seed` is what it decides, `folder` what is left."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, help=f"of the {seed}; else a random one")
    parser.add_argument("--keep", action="store_true", help=f"leave {folder} in place")
    return parser


def carry_out(
    name: str, run: Callable[[argparse.Namespace, Console], bool], options: argparse.Namespace
) -> int:
    """Run a demo: its exit code, which is 1 if it finds a difference."""
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1000)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job is ended too
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        return 0 if run(options, console) else 1
    except (DemoFailed, CkptError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
