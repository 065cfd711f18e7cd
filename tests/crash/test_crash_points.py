"""A real save is stopped at every system call with which it or a prune changes storage.

Killed there, or refused with an error there; after each, a fresh process must resume a whole
generation, bit for bit, and never less than what was reported committed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.crash import programs, tracing
from tests.crash.conftest import Resume, Start
from tests.crash.programs import differences, state_of
from tests.crash.run import Trainer, await_end
from tests.crash.tracing import Point
from torch_ckpt import load_generation
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.litter import litter
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.local import LocalStore

pytestmark = pytest.mark.skipif(tracing.why_not() is not None, reason=str(tracing.why_not()))

Wish = int | tuple[int, str]
SAVE_AND_PRUNE: Wish = 2
SECOND_NAME: Wish = (1, "second-name")


def committed_once(start: Start, root: Path, options: dict[str, Any] | None = None) -> Trainer:
    """A trainer whose step 1 is committed, with all threads of its writer at work."""
    trainer = start(programs.train_on_demand, str(root), options or {})
    trainer.say(1)
    assert trainer.hear_dict()["state"] == "committed"
    return trainer


def writer_of(trainer: Trainer) -> int:
    (pid,) = trainer.writers
    return pid


def points_of(
    start: Start, folder: Path, wish: Wish, options: dict[str, Any] | None = None
) -> list[Point]:
    """Every call with which a save changes storage, in order, found by recording one."""
    trainer = committed_once(start, folder / "recorded", options)
    with tracing.recording(writer_of(trainer), folder / "calls") as points:
        trainer.say(wish)
        assert trainer.hear_dict()["state"] == "committed"
    trainer.finish()
    return points


def hit(trainer: Trainer, point: Point, what: str) -> Any:
    """Attach to the thread of a point."""
    tid = tracing.threads(writer_of(trainer))[point.thread]
    return tracing.injection(tid, point.call, what, point.nth)


def collect(points: list[Point], check: Callable[[Point], None]) -> None:
    """Check every point; all failures are told, by point."""
    assert points
    failures = []
    for point in points:
        try:
            check(point)
        except Exception as error:
            failures.append(f"{point}: {type(error).__name__}: {error}")
    print(f"{len(points)} crash points")
    assert not failures, "\n".join(failures)


def shards_of(root: Path, step: int) -> list[bytes]:
    """The bytes of every file that has the name of a shard."""
    return [file.read_bytes() for file in root.glob(f"step-{step:010d}/*.safetensors")]


def assert_whole(found: dict[str, Any], steps: set[int]) -> None:
    assert found["step"] in steps, found
    assert found["differs"] == [], found


@pytest.fixture
def scratch(tmp_path: Path) -> Callable[[], Path]:
    """A new root at every call."""
    count = iter(range(10_000))
    return lambda: tmp_path / f"run-{next(count)}"


def test_sigkill_of_the_writer_at_every_call_costs_at_most_that_save(
    start: Start, resume: Resume, tmp_path: Path, scratch: Callable[[], Path]
) -> None:
    def check(point: Point) -> None:
        root = scratch()
        trainer = committed_once(start, root)
        old = writer_of(trainer)
        with hit(trainer, point, "signal=KILL"):
            trainer.say(2)
            said = trainer.hear_dict(timeout_s=10)
        assert said["state"] == "failed", said
        assert said["error"].startswith("WriterDied")
        assert "previous generation stands" in said["error"]
        await_end(old)
        assert_whole(resume(root), {1, 2})
        trainer.say(3)
        said = trainer.hear_dict()
        assert said["state"] == "committed", said
        assert said["writer"] != old
        trainer.finish()
        assert differences(load_generation(root), state_of(3)) == []

    collect(points_of(start, tmp_path, SAVE_AND_PRUNE), check)


def test_sigkill_of_both_at_every_call_leaves_the_old_or_the_new_generation(
    start: Start, resume: Resume, tmp_path: Path, scratch: Callable[[], Path]
) -> None:
    def check(point: Point) -> None:
        root = scratch()
        trainer = committed_once(start, root)
        with hit(trainer, point, "signal=KILL"):
            trainer.say(2)
            await_end(writer_of(trainer))
            trainer.kill()
        assert trainer.join() == -9
        # Its size alone tells nobody that the bytes are not there yet.
        assert shards_of(root, 2) in ([], shards_of(tmp_path / "recorded", 2))
        assert_whole(resume(root), {1, 2})
        again = start(programs.train_on_demand, str(root), {})
        again.say(2)
        assert again.hear_dict()["state"] == "committed"
        again.finish()
        assert differences(load_generation(root), state_of(2)) == []

    collect(points_of(start, tmp_path, SAVE_AND_PRUNE), check)


def test_sigkill_at_every_call_of_a_second_name_keeps_the_first(
    start: Start, resume: Resume, tmp_path: Path, scratch: Callable[[], Path]
) -> None:
    def check(point: Point) -> None:
        root = scratch()
        trainer = committed_once(start, root, {"keep": None, "named": True})
        with hit(trainer, point, "signal=KILL"):
            trainer.say(SECOND_NAME)
            assert trainer.hear_dict(timeout_s=10)["state"] == "failed"
        assert_whole(resume(root), {1})
        first = Catalog(LocalStore(str(root))).find(folder="step-0000000001")
        assert verify(LocalStore(str(root)), first).ok
        trainer.say(SECOND_NAME)
        assert trainer.hear_dict()["state"] == "committed"
        trainer.finish()
        assert differences(load_generation(root, folder="second-name"), state_of(1)) == []

    points = points_of(start, tmp_path, SECOND_NAME, {"named": True})
    assert any("link" in point.call for point in points)
    collect(points, check)


def test_sigkill_of_the_trainer_at_every_call_of_a_save_loses_at_most_what_was_not_staged(
    start: Start, resume: Resume, tmp_path: Path, scratch: Callable[[], Path]
) -> None:
    """Nothing of a trainer touches storage; these are the calls with which it hands over."""
    calls = "sendmsg,sendto,ftruncate,clone,clone3,memfd_create,socketpair,pidfd_open"

    def staging(root: Path) -> Trainer:
        trainer = start(programs.stage, str(root), "fenced", {})
        trainer.hear_dict()
        return trainer

    recorded = staging(scratch())
    with tracing.recording(recorded.pid, tmp_path / "calls", calls) as points:
        recorded.say()
        recorded.hear_dict()
    recorded.finish()
    resumed = []

    def check(point: Point) -> None:
        root = scratch()
        trainer = staging(root)
        here, action = (point.call, "signal=KILL", point.nth), tracing.injection
        if point.thread:  # the copying thread, which is not there yet
            action = tracing.injection_everywhere
        with action(trainer.pid, *here):
            trainer.say()
            assert trainer.join() == -9
        found = resume(root)
        assert_whole(found, {1, 2})
        resumed.append(found["step"])

    collect(points, check)
    assert set(resumed) == {1, 2}  # killed before, and after the hand-over


@pytest.mark.slow
def test_sigkill_at_every_call_of_the_very_first_save_leaves_it_or_a_fresh_run(
    start: Start, resume: Resume, tmp_path: Path, scratch: Callable[[], Path]
) -> None:
    def ready(root: Path) -> Trainer:
        trainer = start(programs.train_on_demand, str(root), {"prepare": True})
        trainer.hear_dict()
        return trainer

    recorded = ready(scratch())
    with tracing.recording(writer_of(recorded), tmp_path / "calls") as points:
        recorded.say(1)
        assert recorded.hear_dict()["state"] == "committed"
    recorded.finish()
    resumed = []

    def check(point: Point) -> None:
        root = scratch()
        trainer = ready(root)
        with tracing.injection_everywhere(writer_of(trainer), point.call, "signal=KILL", point.nth):
            trainer.say(1)
            await_end(writer_of(trainer))
            trainer.kill()
        assert trainer.join() == -9
        found = resume(root)
        assert found["error"] is None, found
        assert found["step"] in (None, 1), found
        assert found.get("differs", []) == [], found
        resumed.append(found["step"])

    collect(list({(p.call, p.nth): p for p in points}.values()), check)
    assert set(resumed) == {None, 1}


@pytest.mark.parametrize(
    ("errno", "says"), [("ENOSPC", "No space left on device; free space"), ("EIO", "kernel log")]
)
def test_an_error_at_every_call_fails_that_save_clearly_or_only_its_tidying(
    start: Start, resume: Resume, tmp_path: Path, errno: str, says: str
) -> None:
    points = points_of(start, tmp_path, SAVE_AND_PRUNE)
    root = tmp_path / "run"
    trainer = committed_once(start, root)
    store, step = LocalStore(str(root)), 1
    outcomes = []

    def check(point: Point) -> None:
        nonlocal step
        step += 1
        with hit(trainer, point, f"error={errno}"):
            trainer.say(step)
            said = trainer.hear_dict()
        outcomes.append(said["state"])
        newest = Catalog(store).committed()[0]
        if said["state"] == "failed":
            assert says in said["error"], said
            assert "previous generation stands" in said["error"]
            assert newest.step in {step - 1, step}  # only its name's durability may have failed
        else:
            assert said["state"] == "committed", said
            assert any("tidying" in line for line in said["log"]), said
            assert newest.step == step
        assert verify(store, newest).ok
        assert differences(load_generation(root), state_of(newest.step)) == []
        step += 1
        trainer.say(step)
        said = trainer.hear_dict()
        assert said["state"] == "committed", said
        assert differences(load_generation(root), state_of(step)) == []

    collect(points, check)
    assert {"failed", "committed"} == set(outcomes)
    trainer.finish()
    assert_whole(resume(root), {step})
    assert trainer.writers == {writer_of(trainer)}  # no error ended it
    left = [one.step for one in Catalog(store).committed()]
    assert len(left) <= 3, left


def test_nothing_is_left_of_a_save_whose_manifest_could_not_be_written(
    start: Start, tmp_path: Path
) -> None:
    trainer = committed_once(start, tmp_path)
    points = points_of(start, tmp_path / "other", SAVE_AND_PRUNE)
    manifest_write = [point for point in points if point.call == "write"][1]
    with hit(trainer, manifest_write, "error=ENOSPC"):
        trainer.say(2)
        assert trainer.hear_dict()["state"] == "failed"
    store = LocalStore(str(tmp_path))
    assert "step-0000000002" not in store.folders()
    assert litter(store, store.folders()) == []
    trainer.finish()
