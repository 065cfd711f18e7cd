"""A prune of a root whose history goes on to an archive is cut at every call that changes storage.

The writer is killed there, or the trainer alone while the writer is at it, or both. Nothing that
was committed is lost: root or archive has it whole, and the next prunes remove what this one left.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.crash import tracing
from tests.crash.conftest import Start
from tests.crash.programs import SMALL
from tests.crash.run import PATIENCE_S, Trainer, await_end
from tests.s3.programs import train
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.local import LocalStore

pytestmark = pytest.mark.skipif(tracing.why_not() is not None, reason=str(tracing.why_not()))

DELETING = "unlink,unlinkat,rmdir"
STEP_1 = "step-0000000001"


class Tiers:
    """A root that keeps one generation, and an archive that keeps all."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.root, self.archive = (LocalStore(str(folder / x)) for x in ("root", "archive"))

    def start(self, start: Start) -> tuple[Trainer, dict[str, Any]]:
        """A trainer, and what it says of its resume."""
        options = {"archive": self.archive.url, "keep_archive": None, "size": SMALL}
        trainer = start(train, self.root.url, options)
        return trainer, trainer.hear_dict()

    def steps(self) -> tuple[set[int], set[int]]:
        """In the root, and in the archive."""
        found = [{one.step for one in Catalog(s).committed()} for s in (self.root, self.archive)]
        return found[0], found[1]

    def assert_sound(self) -> None:
        for store in (self.root, self.archive):
            committed, damaged = Catalog(store).scan()
            assert damaged == []
            assert all(verify(store, one).ok for one in committed)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def archived_once(start: Start, tiers: Tiers) -> Trainer:
    """A trainer whose step 1 is in root and archive, so that the next save lets it go."""
    trainer, said = tiers.start(start)
    assert said["step"] is None
    save(trainer, 1)
    return trainer


def save(trainer: Trainer, step: int) -> None:
    """Have a step saved, and wait for the archive to have it."""
    trainer.say(("save", step))
    assert trainer.hear_dict()["state"] == "committed"
    trainer.say(("archived", step))
    assert trainer.hear_dict()["error"] is None


@contextmanager
def stopped_at(pid: int, call: str, nth: int, log: Path) -> Iterator[Callable[[], bool]]:
    """Have a process stop at the n-th call of one of its threads; whether it has."""
    arguments = ["-f", "-o", str(log), "-e", f"trace={call}"]
    arguments += ["-e", f"inject={call}:signal=STOP:when={nth}"]
    with tracing.attached(arguments, [pid], also=tracing.threads(pid)):
        yield lambda: "stopped by SIGSTOP" in log.read_text()


def cut(tiers: Tiers, trainer: Trainer, who: str, call: str, nth: int) -> bool:
    """Save step 2 and be cut in its prune; whether the trainer was told that it is committed."""
    (writer,) = trainer.writers
    with stopped_at(writer, call, nth, tiers.folder / "calls") as stopped:
        trainer.say(("save", 2))
        until(stopped)  # the call is done: a stop waits for its end
        if who != "writer":
            trainer.kill()
            assert trainer.join() == -9
        with contextlib.suppress(ProcessLookupError):
            os.kill(writer, signal.SIGCONT if who == "trainer" else signal.SIGKILL)
    if who != "writer":
        await_end(writer)  # alone it finishes what it can
        return True
    return trainer.hear_dict()["state"] == "committed"


def prune_cut_at(start: Start, tiers: Tiers, who: str, call: str, nth: int) -> None:
    trainer = archived_once(start, tiers)
    committed = cut(tiers, trainer, who, call, nth)
    tiers.assert_sound()
    root, archive = tiers.steps()
    assert 1 in archive
    assert not committed or 2 in root
    if who == "trainer":
        assert (root, archive) == ({2}, {1, 2})
        assert tiers.root.folders() == ["step-0000000002"]
    if who != "writer":
        trainer, said = tiers.start(start)
        assert (said["step"], said["differs"]) == (max(root), [])
    save(trainer, 3)
    save(trainer, 4)
    trainer.finish()
    tiers.assert_sound()
    root, archive = tiers.steps()
    assert root == {4}
    assert {1, 3, 4} | ({2} if committed else set()) <= archive
    assert tiers.root.folders() == ["step-0000000004"], "what the cut prune left is gone"


@pytest.mark.parametrize(
    ("who", "call", "nth"),
    [
        ("writer", "unlink", 1),
        ("trainer", "unlink", 1),
        ("both", "unlink", 2),
    ],
)
def test_a_prune_of_the_root_that_is_cut_loses_nothing(
    start: Start, tmp_path: Path, who: str, call: str, nth: int
) -> None:
    prune_cut_at(start, Tiers(tmp_path), who, call, nth)


def points_of(start: Start, tiers: Tiers) -> list[tuple[str, int]]:
    """The calls by which one thread takes step 1 out of the root, as the n-th of their kind."""
    trainer = archived_once(start, tiers)
    (writer,) = trainer.writers
    log = tiers.folder / "recorded"
    with tracing.recording(writer, log, DELETING) as points:
        save(trainer, 2)
        until(lambda: tiers.root.folders() == ["step-0000000002"])
    trainer.finish()
    lines = [line for line in log.read_text().splitlines() if re.match(r"\d+\s+\w+\(", line)]
    return [
        (point.call, point.nth) for point, line in zip(points, lines, strict=True) if STEP_1 in line
    ]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["writer", "trainer", "both"])
def test_a_prune_of_the_root_cut_at_any_call_loses_nothing(
    start: Start, tmp_path: Path, who: str
) -> None:
    points = points_of(start, Tiers(tmp_path / "recorded"))
    assert len(points) >= 3  # manifest, part, shard
    for number, (call, nth) in enumerate(points):
        prune_cut_at(start, Tiers(tmp_path / str(number)), who, call, nth)
