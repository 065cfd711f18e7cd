"""With a limit of one, `save_state` is killed inside each of consecutive saves.

After every kill a fresh process of the same script must load the generation before or the new one,
bit for bit, and save on from there: all in one folder, so that it also meets what the kills left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from accelerate_ckpt import CheckpointPlugin
from tests.accelerate.job import committed, number_of, reset
from tests.accelerate.test_saves import Run
from tests.crash import tracing
from tests.crash.run import Inside, Trainer, await_end
from tests.crash.tracing import Point
from torch_ckpt import CkptError

pytestmark = pytest.mark.skipif(tracing.why_not() is not None, reason=str(tracing.why_not()))

HAND_OVER = "sendmsg,sendto,ftruncate,clone,clone3,memfd_create,socketpair,pidfd_open"
"""The calls with which a trainer gives a save to its writer; it does not touch storage itself."""

Start = Callable[[Path], Trainer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the script in a process of its own, and ends what it left after the test."""
    started: list[Trainer] = []

    def start_one(folder: Path) -> Trainer:
        started.append(Trainer(script, str(folder)))
        return started[-1]

    yield start_one
    for trainer in started:
        trainer.end()


def script(inside: Inside, folder: str) -> None:
    """Resume, and at each word of the test take a step and save."""
    torch.set_num_threads(1)
    job = Run(Path(folder), CheckpointPlugin(on_error="raise"), total_limit=1)
    job.checkpoints.resume()
    inside.say({"step": job.checkpoints.step, "weight": job.weight().tolist()})
    while inside.hear() is not None:
        job.step()
        error = None
        job.accelerator.save_state()
        try:
            job.checkpoints.wait()
        except CkptError as failure:
            error = str(failure)
        writer = job.checkpoints._open().writer_pid
        inside.say({"step": job.checkpoints.step, "error": error, "writer": writer})
    job.accelerator.end_training()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The weights after each step of a run that nobody kills."""
    job = Run(tmp_path_factory.mktemp("whole"))
    found = [job.weight().tolist()]
    for _ in range(200):
        job.step()
        found.append(job.weight().tolist())
    job.checkpoints.close()
    reset()
    return found


def saved_once(start: Start, folder: Path, weights: list[Any], steps: set[int]) -> Trainer:
    """A new process that has resumed one of these steps exactly, and has saved the next one."""
    trainer = start(folder)
    found = trainer.hear_dict()
    assert found["step"] in steps, (found["step"], steps)
    assert found["weight"] == weights[found["step"]]
    save(trainer)
    return trainer


def save(trainer: Trainer) -> None:
    trainer.say(1)
    said = trainer.hear_dict()
    assert said["error"] is None, said


def writer_of(trainer: Trainer) -> int:
    return max(trainer.writers)


def newest(folder: Path) -> int:
    """The step of the newest generation; a kill before the prune leaves the one before as well."""
    return number_of(folder / "checkpoints" / committed(str(folder / "checkpoints"))[-1])


def points_of(
    start: Start, folder: Path, weights: list[Any], calls: str = tracing.CALLS
) -> list[Point]:
    """Every such call of the writer, or of the trainer, in a save that goes well, in order.

    Those of a pool are counted by thread, and which thread does what differs from save to save.
    """
    trainer = saved_once(start, folder / "recorded", weights, {0})
    pid = trainer.pid if calls == HAND_OVER else writer_of(trainer)
    with tracing.recording(pid, folder / "calls", calls) as points:
        save(trainer)
    trainer.finish()
    assert len(points) >= 3, points
    return list({(point.call, point.nth): point for point in points}.values())


def killed_inside_save(trainer: Trainer, pid: int, point: Point) -> bool:
    """Have a process killed at a call of the next save; whether it came to that call."""
    with tracing.injection_everywhere(pid, point.call, "signal=KILL", point.nth):
        trainer.say(1)
        try:
            psutil.Process(pid).wait(timeout=3)
        except psutil.TimeoutExpired:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            pass
        return True


def check_good_end(start: Start, folder: Path, weights: list[Any], steps: set[int]) -> None:
    """One more process saves and ends; of all the saves exactly the newest is left."""
    saved_once(start, folder, weights, steps).finish()
    assert len(committed(str(folder / "checkpoints"))) == 1


EVERY = pytest.mark.parametrize(
    "every",
    [
        pytest.param(4, marks=pytest.mark.slow, id="some"),
        pytest.param(1, marks=pytest.mark.sweep, id="all"),
    ],
)


@EVERY
def test_killed_with_its_writer_inside_consecutive_saves_the_old_or_the_new_one_loads(
    start: Start, tmp_path: Path, weights: list[Any], every: int
) -> None:
    folder, steps, hits = tmp_path / "run", {0}, []
    for point in points_of(start, tmp_path, weights)[::every]:
        trainer = saved_once(start, folder, weights, steps)
        step = newest(folder)
        hits.append(killed_inside_save(trainer, writer_of(trainer), point))
        trainer.kill()
        assert trainer.join() == -9
        await_end(writer_of(trainer))
        steps = {step, step + 1}
    check_good_end(start, folder, weights, steps)
    assert sum(hits) > len(hits) / 2, hits


@EVERY
def test_a_run_whose_writer_is_killed_inside_consecutive_saves_is_told_and_saves_again(
    start: Start, tmp_path: Path, weights: list[Any], every: int
) -> None:
    folder, hits = tmp_path / "run", []
    points = points_of(start, tmp_path, weights)[::every]
    trainer = saved_once(start, folder, weights, {0})
    for point in points:
        step = newest(folder)
        hits.append(killed_inside_save(trainer, writer_of(trainer), point))
        said = trainer.hear_dict()
        assert ("previous generation stands" in str(said["error"])) == hits[-1], said
        assert newest(folder) in {step, step + 1}
        save(trainer)
        assert newest(folder) == step + 2
    trainer.finish()
    check_good_end(start, folder, weights, {1 + 2 * len(points)})
    assert sum(hits) > len(hits) / 2, hits


@pytest.mark.slow
def test_killed_while_it_hands_over_consecutive_saves_the_old_or_the_new_one_loads(
    start: Start, tmp_path: Path, weights: list[Any]
) -> None:
    folder, steps = tmp_path / "run", {0}
    for point in points_of(start, tmp_path, weights, HAND_OVER):
        trainer = saved_once(start, folder, weights, steps)
        step = newest(folder)
        assert killed_inside_save(trainer, trainer.pid, point), point
        assert trainer.join() == -9
        await_end(writer_of(trainer))  # it finishes what it was given
        steps = {newest(folder)}
        assert steps <= {step, step + 1}
    check_good_end(start, folder, weights, steps)
