"""Every fault on the way to the archive and back: training goes on, nothing wrong is committed.

A real trainer, whose archive is a bucket behind a proxy that breaks requests.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from tests.s3.archived import Run, ask, end, kill, until
from tests.s3.rules import (
    DENIED,
    ERROR_WITH_200,
    INTERNAL_ERROR,
    SLOW_DOWN,
    Fault,
    Flip,
    Reset,
    Stall,
)
from torch_ckpt.generations.tiers import PATIENCE_S

SMALL = 2000
QUICK = {"config_kwargs": {"read_timeout": 2}}
PART: dict[str, Any] = {"method": "PUT", "query": "partNumber=1&"}
COMPLETE: dict[str, Any] = {"method": "POST", "query": "^uploadId="}
SHARD: dict[str, Any] = {"method": "PUT", "path": "safetensors"}
DOCUMENT: dict[str, Any] = {"method": "PUT", "path": r"rank-\d+\.\w+\.json"}
MANIFEST: dict[str, Any] = {"method": "PUT", "path": "manifest"}
ARRIVED: dict[str, Any] = {"method": "GET", "path": "safetensors"}

FAULTS: list[tuple[Fault, dict[str, Any]]] = [
    (SLOW_DOWN, PART),
    (INTERNAL_ERROR, {"method": "POST", "query": "^uploads"}),
    (DENIED, PART),
    (DENIED, DOCUMENT),
    (ERROR_WITH_200, COMPLETE),
    (Reset(at="upload"), PART),
    (Reset(at="answer"), PART),
    (Reset(at="answer"), COMPLETE),
    (Reset(at="answer"), MANIFEST),
    (Reset(at="download", orderly=True), ARRIVED),
    (Flip(at="download"), ARRIVED),
    (Flip(at="upload"), DOCUMENT),
    (Flip(at="upload"), MANIFEST),
    (Stall(seconds=30), PART),
    (Stall(seconds=30, at="answer"), {"path": "manifest"}),
]


@pytest.mark.parametrize(
    "faults",
    [FAULTS[2:8:3], pytest.param(FAULTS, marks=pytest.mark.slow)],
    ids=["a few", "all"],
)
def test_after_each_fault_the_promotion_succeeds(
    run: Run, faults: list[tuple[Fault, dict[str, Any]]]
) -> None:
    trainer, _ = run.start(request_options=QUICK)
    for step, (fault, where) in enumerate(faults, 1):
        run.proxy.clear()
        rule = run.proxy.on(fault, **where)
        assert ask(trainer, "save", step)["state"] == "committed"
        answer = ask(trainer, "archived", step)
        assert rule.struck == 1, (fault, where)
        assert answer["error"] is None, (fault, where, answer)
        assert run.tidy(), (fault, where)
    log = end(trainer)
    assert run.steps() == list(range(1, len(faults) + 1))
    run.assert_sound()
    assert len([line for line in log if "wait for" in line]) <= 2, log


@pytest.mark.slow
@pytest.mark.parametrize("where", [PART, MANIFEST, {"method": "GET"}], ids=["part", "last", "get"])
def test_a_server_that_says_slow_down_ten_times_gets_it_in_the_end(
    run: Run, where: dict[str, Any]
) -> None:
    trainer, _ = run.start()
    rule = run.proxy.on(SLOW_DOWN, **where, times=10)
    assert ask(trainer, "save", 1)["state"] == "committed"
    answer = ask(trainer, "archived", 1, 240.0, timeout_s=250.0)
    assert (answer["error"], rule.struck) == (None, 10)
    log = end(trainer)
    assert run.steps() == [1]
    run.assert_sound()
    assert run.tidy()
    assert run.sent(".safetensors") < 3 * run.shards().popitem()[1]
    assert len([line for line in log if "wait for" in line]) <= 3, log


def test_a_flipped_bit_on_the_way_to_a_server_that_does_not_check_is_found(run: Run) -> None:
    rules = [run.proxy.on(Flip(at="upload"), **where) for where in (SHARD, DOCUMENT, MANIFEST)]
    rules.append(run.proxy.on(Flip(at="upload"), method="PUT", path="RUN.json"))
    run.train(1, size=SMALL)
    assert [rule.struck for rule in rules] == [1, 1, 1, 1]
    assert run.steps() == [1]
    run.assert_sound()
    assert run.train(2, size=SMALL)["step"] == 1
    assert run.steps() == [1, 2]


@pytest.mark.slow
def test_an_archive_that_is_down_costs_a_line_and_a_little_memory(run: Run) -> None:
    trainer, _ = run.start(size=SMALL)
    assert ask(trainer, "save", 1)["state"] == "committed"
    assert ask(trainer, "archived", 1)["error"] is None
    before = ask(trainer, "state")["bytes"]
    rule = run.proxy.on(SLOW_DOWN, times=math.inf)
    steps = range(2, 16)
    for step in steps:
        said = ask(trainer, "save", step)
        assert (said["state"], said["error"]) == ("committed", None)
        assert said["took_s"] < 10
    said = ask(trainer, "state")
    assert said["lag"] == len(steps)
    assert said["bytes"] < before + (32 << 20)
    assert len(said["log"]) <= 1, said["log"]
    rule.times = 0
    for step in steps:
        assert ask(trainer, "archived", step)["error"] is None, step
    end(trainer)
    assert run.own_steps() == [15]
    run.assert_sound()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [SLOW_DOWN, Stall(seconds=100)], ids=["503", "stalled"])
def test_a_run_whose_root_has_enough_does_not_wait_for_an_archive_that_is_down(
    run: Run, fault: Fault
) -> None:
    run.train(1, size=SMALL)
    rule = run.proxy.on(fault, times=math.inf)
    trainer, said = run.start(size=SMALL, archive_timeout_s=0)
    assert (said["step"], said["differs"]) == (1, [])
    assert said["took_s"] < PATIENCE_S + 5
    assert any("no sign of life" in line for line in said["log"])
    assert rule.struck
    rule.times = 0
    end(trainer)


@pytest.mark.parametrize(
    "fault",
    [
        Flip(at="download"),
        pytest.param(Reset(at="download", orderly=True), marks=pytest.mark.slow),
        pytest.param(SLOW_DOWN, marks=pytest.mark.slow),
    ],
    ids=["flipped", "cut", "503"],
)
def test_a_restore_over_a_faulty_way_gets_the_right_bits(run: Run, fault: Fault) -> None:
    run.train(1, 2)
    lose(run)
    rules = [run.proxy.on(fault, **ARRIVED, nth=2), run.proxy.on(fault, method="GET", path="json")]
    resumed = run.train(archive_timeout_s=0)
    assert [rule.struck for rule in rules] == [1, 1]
    assert (resumed["step"], resumed["differs"]) == (2, [])


@pytest.mark.slow
def test_a_way_that_flips_every_block_gives_no_wrong_bits(run: Run) -> None:
    run.train(1)
    run.train(2, archive=None)
    run.train(archive_timeout_s=60)
    assert run.steps() == [1, 2]
    lose(run)
    run.train(3, archive=None)
    rule = run.proxy.on(Flip(at="download"), **ARRIVED, times=math.inf)
    trainer, said = run.start(keep=None)
    assert (said["step"], said["differs"]) == (3, [])
    end(trainer)
    lose(run)
    trainer, said = run.start(archive_timeout_s=0)
    assert said["step"] is None
    assert "NothingUsable" in said["error"]
    assert rule.struck
    end(trainer)


def lose(run: Run) -> None:
    """The root is lost."""
    run.root.rename(run.root.with_name(f"lost-{time.monotonic_ns()}"))


def test_of_two_fresh_runs_on_one_prefix_one_promotes(run: Run) -> None:
    started = [run.start(root=run.root.with_name(name), size=SMALL) for name in ("a", "b")]
    for trainer, _ in started:
        trainer.say(("save", 1))
    for trainer, _ in started:
        assert trainer.hear_dict()["state"] == "committed"
    errors = [ask(trainer, "archived", 1)["error"] for trainer, _ in started]
    assert sorted(error is None for error in errors) == [False, True], errors
    assert all(error is None or "is the archive of run" in error for error in errors)
    for trainer, _ in started:
        end(trainer)
    assert run.steps() == [1]
    assert len(run.shards()) == 1


@pytest.mark.parametrize("how", [pytest.param("limited", marks=pytest.mark.slow), "stalled"])
def test_a_new_trainer_hurries_the_writer_of_the_dead_one(run: Run, how: str) -> None:
    slow = {"bandwidth_limit": 1 << 20} if how == "limited" else {}
    trainer, _ = run.start(**slow)
    rule = run.proxy.on(Stall(seconds=0 if how == "limited" else 100), **PART)
    assert ask(trainer, "save", 1)["state"] == "committed"
    until(lambda: rule.struck > 0) if how == "stalled" else time.sleep(1)
    kill(trainer.pid)
    began = time.monotonic()
    after, said = run.start()
    assert time.monotonic() - began < 20
    assert (said["step"], said["differs"]) == (1, [])
    end(after)
    assert run.steps() == [1]
    run.assert_sound()
    assert run.tidy()


def test_closing_does_not_wait_for_an_archive_that_hangs(run: Run) -> None:
    trainer, _ = run.start(size=SMALL, archive_timeout_s=1)
    for step in (1, 2):
        assert ask(trainer, "save", step)["state"] == "committed"
        assert ask(trainer, "archived", step)["error"] is None
    rule = run.proxy.on(Stall(seconds=100), method="GET", times=math.inf)
    assert ask(trainer, "save", 3)["state"] == "committed"
    until(lambda: rule.struck > 0)
    assert ask(trainer, "close")["took_s"] < 20
    end(trainer)


def test_what_a_dead_writer_had_to_promote_is_promoted_by_the_next_one(run: Run) -> None:
    trainer, said = run.start(size=SMALL)
    rule = run.proxy.on(SLOW_DOWN, **SHARD, times=math.inf)
    assert ask(trainer, "save", 1)["state"] == "committed"
    until(lambda: rule.struck > 0)
    kill(said["writer"])
    rule.times = 0
    assert ask(trainer, "archived", 1)["error"] is None
    end(trainer)
    assert run.steps() == [1]


def test_what_was_archived_while_the_trainer_closed_counts_as_archived(run: Run) -> None:
    trainer, _ = run.start(size=SMALL)
    assert ask(trainer, "save", 1)["state"] == "committed"
    assert ask(trainer, "close")["error"] is None
    assert ask(trainer, "archived", 1, 1.0)["error"] is None
    end(trainer)
