"""Trainer and writer are killed, stopped and outlived, each at the worst moment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.crash import programs, tracing
from tests.crash.conftest import Resume, Start
from tests.crash.programs import LARGE
from tests.crash.run import Trainer, await_end

HOWS = ["block", "waited", "fenced", "first", "children"]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def writer_of(trainer: Trainer) -> int:
    return max(trainer.writers)


def on_demand(start: Start, root: Path, **options: object) -> Trainer:
    """A trainer whose step 1 is committed."""
    trainer = start(programs.train_on_demand, str(root), options)
    trainer.say(1)
    assert trainer.hear_dict()["state"] == "committed"
    return trainer


def assert_next_save_works(trainer: Trainer, resume: Resume, root: Path, step: int) -> None:
    trainer.say(step)
    said = trainer.hear_dict()
    assert said["state"] == "committed", said
    trainer.finish()
    found = resume(root)
    assert (found["step"], found["differs"]) == (step, [])


@pytest.mark.parametrize("how", HOWS)
def test_sigkill_of_the_trainer_right_after_staged_loses_nothing(
    start: Start, resume: Resume, tmp_path: Path, how: str
) -> None:
    trainer = start(programs.stage, str(tmp_path), how, {})
    trainer.hear_dict()
    trainer.say()
    trainer.hear_dict()
    trainer.kill()
    found = resume(tmp_path)
    assert (found["step"], found["differs"]) == (2, [])
    assert trainer.join() == -9


def test_a_new_trainer_waits_for_the_writer_of_the_dead_one(
    start: Start, resume: Resume, tmp_path: Path
) -> None:
    trainer = start(programs.stage, str(tmp_path), "children", {})
    writer = trainer.hear_dict()["writer"]
    stop(writer)
    trainer.say()
    trainer.hear_dict()
    trainer.kill()
    assert trainer.join() == -9
    late = start(programs.resume_once, str(tmp_path), programs.SMALL, {"orphan_timeout_s": 0.5})
    assert "RunBusy" in late.hear_dict()["error"]
    late.join()
    patient = start(programs.resume_once, str(tmp_path), programs.SMALL, {})
    with pytest.raises(TimeoutError):
        patient.hear(timeout_s=1.5)
    go_on(writer)
    found = patient.hear_dict()
    assert (found["step"], found["differs"]) == (2, [])
    await_end(writer)


def test_sigkill_of_the_trainer_during_the_copy_costs_that_snapshot_only(
    start: Start, resume: Resume, tmp_path: Path
) -> None:
    trainer = start(programs.die_copying, str(tmp_path))
    assert trainer.hear_dict()["state"] == "copying"
    assert trainer.join() == -9
    found = resume(tmp_path)
    assert (found["step"], found["differs"]) == (1, [])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_a_writer_killed_during_a_save_is_noticed_and_replaced(
    start: Start, resume: Resume, tmp_path: Path, number: signal.Signals
) -> None:
    trainer = on_demand(start, tmp_path)
    old = writer_of(trainer)
    stop(old)
    trainer.say(2)
    with pytest.raises(TimeoutError):
        trainer.hear(timeout_s=0.5)
    os.kill(old, number)
    if number != signal.SIGKILL:  # which ends also a stopped process, perhaps before the next line
        go_on(old)
    began = time.monotonic()
    said = trainer.hear_dict()
    assert time.monotonic() - began < 10
    assert said["error"].startswith("WriterDied"), said
    assert_next_save_works(trainer, resume, tmp_path, 3)
    assert trainer.writers != {old}


def test_signals_to_a_whole_job_leave_the_writer_at_work(
    start: Start, resume: Resume, tmp_path: Path
) -> None:
    trainer = on_demand(start, tmp_path)
    writer = writer_of(trainer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(writer, number)
    assert_next_save_works(trainer, resume, tmp_path, 2)
    assert trainer.writers == {writer}


def test_a_stopped_writer_is_noticed_within_the_time_out_and_replaced(
    start: Start, resume: Resume, tmp_path: Path
) -> None:
    trainer = on_demand(start, tmp_path, writer_timeout_s=2)
    old = writer_of(trainer)
    stop(old)
    began = time.monotonic()
    trainer.say(2)
    said = trainer.hear_dict()
    assert 1.5 < time.monotonic() - began < 8
    assert said["error"].startswith("WriterDied"), said
    assert "did not answer for 2 s" in said["error"]
    await_end(old)
    assert_next_save_works(trainer, resume, tmp_path, 3)


def test_a_trainer_that_was_stopped_for_longer_than_every_time_out_fails_nothing(
    start: Start, resume: Resume, tmp_path: Path
) -> None:
    trainer = start(programs.stage, str(tmp_path), "large", {"writer_timeout_s": 2})
    trainer.hear_dict()
    trainer.say()
    trainer.hear_dict()
    trainer.kill(signal.SIGSTOP)
    time.sleep(4)
    trainer.kill(signal.SIGCONT)
    trainer.say()
    assert trainer.join() == 0
    found = resume(tmp_path, size=LARGE)
    assert (found["step"], found["differs"]) == (2, [])


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
def test_both_killed_leaves_the_old_or_the_new_generation(
    start: Start, resume: Resume, tmp_path: Path, delay_s: float
) -> None:
    trainer = start(programs.stage, str(tmp_path), "large", {})
    writer = trainer.hear_dict()["writer"]
    trainer.say()
    trainer.hear_dict()
    time.sleep(delay_s)
    trainer.kill()
    os.kill(writer, signal.SIGKILL)
    trainer.join()
    await_end(writer)
    sized = start(programs.train_on_demand, str(tmp_path), {"keep": None})
    sized.say(3)  # saves beside whatever was left
    assert sized.hear_dict()["state"] == "committed"
    sized.finish()
    found = resume(tmp_path)
    assert (found["step"], found["differs"]) == (3, [])


def test_two_trainers_of_one_run_are_refused_by_pid(
    start: Start, resume: Resume, tmp_path: Path
) -> None:
    first = on_demand(start, tmp_path)
    found = resume(tmp_path)
    assert found["error"].startswith("RunBusy")
    assert f"process {first.pid} " in found["error"]
    second = start(programs.train_on_demand, str(tmp_path), {})
    second.say(2)
    with pytest.raises(AssertionError, match=f"RunBusy: process {first.pid} "):
        second.hear()
    first.finish()
    assert resume(tmp_path)["step"] == 1


def test_a_trainer_that_looked_before_the_other_came_is_refused_too(
    start: Start, resume: Resume, tmp_path: Path
) -> None:
    late = start(programs.save_after_looking, str(tmp_path))
    late.hear_dict()
    first = on_demand(start, tmp_path)
    late.say()
    with pytest.raises(AssertionError, match=f"RunBusy: process {first.pid} "):
        late.hear()
    first.finish()
    assert resume(tmp_path)["step"] == 1


def test_close_tells_that_the_last_save_failed(start: Start, tmp_path: Path) -> None:
    trainer = start(programs.close_at_once, str(tmp_path), programs.SMALL, {})
    writer = trainer.hear_dict()["writer"]
    stop(writer)
    trainer.say()
    trainer.hear_dict()
    trainer.say()
    os.kill(writer, signal.SIGKILL)
    said = trainer.hear_dict()
    assert said["state"] == "failed"
    assert said["error"].startswith("WriterDied")
    trainer.finish()


@pytest.mark.skipif(tracing.why_not() is not None, reason=str(tracing.why_not()))
def test_close_waits_for_a_save_that_takes_longer_than_the_writers_time_out(
    start: Start, resume: Resume, tmp_path: Path
) -> None:
    options = {"writer_timeout_s": 2}
    trainer = start(programs.close_at_once, str(tmp_path), programs.SMALL, options)
    works_through_jobs = tracing.threads(trainer.hear_dict()["writer"])[1]
    with tracing.injection(works_through_jobs, "fsync", "delay_enter=6000000"):
        trainer.say()
        trainer.hear_dict()
        trainer.say()
        said = trainer.hear_dict()
    assert (said["state"], said["error"]) == ("committed", None)
    assert said["took_s"] > 4
    trainer.finish()
    assert resume(tmp_path)["step"] == 2


def test_close_does_not_hang_on_a_stopped_writer(start: Start, tmp_path: Path) -> None:
    trainer = start(programs.close_at_once, str(tmp_path), 0, {"writer_timeout_s": 2})
    writer = trainer.hear_dict()["writer"]
    trainer.say()
    trainer.hear_dict()
    stop(writer)
    trainer.say()
    assert trainer.hear_dict()["took_s"] < 15
    await_end(writer)
    trainer.finish()


def test_a_save_without_descriptors_fails_and_the_next_one_works(
    start: Start, resume: Resume, tmp_path: Path
) -> None:
    trainer = start(programs.run_out_of_descriptors, str(tmp_path))
    said = trainer.hear_dict()
    assert said["state"] == "failed"
    assert "Too many open files" in said["error"]
    assert trainer.hear_dict()["state"] == "committed"
    assert trainer.join() == 0
    assert resume(tmp_path)["step"] == 2
