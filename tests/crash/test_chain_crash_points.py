"""An incremental save and its prune are stopped at every system call that changes storage.

After each, no generation lacks its base, and a fresh process resumes a whole one, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import chains
from tests.crash import chain_program, tracing
from tests.crash.conftest import Start
from tests.crash.run import Trainer, await_end
from tests.crash.test_crash_points import collect, hit, writer_of
from tests.crash.tracing import Point
from torch_ckpt import load_generation

pytestmark = pytest.mark.skipif(tracing.why_not() is not None, reason=str(tracing.why_not()))

CHILD, FRESH = 3, 4
"""A save that builds on others; one that stands alone, whose prune ends a whole chain."""


def trained(start: Start, root: Path, steps: int) -> Trainer:
    trainer = start(chain_program.train, str(root), steps)
    trainer.hear_dict()
    return trainer


def points_of(start: Start, folder: Path, step: int) -> list[Point]:
    trainer = trained(start, folder / "recorded", step - 1)
    with tracing.recording(writer_of(trainer), folder / "calls") as points:
        trainer.say(step)
        assert trainer.hear_dict()["state"] == "committed"
    trainer.finish()
    return points


def assert_no_child_lacks_its_base(root: Path) -> None:
    there = chains.by_step(root)
    for one in there.values():
        assert there.keys() >= set(one.manifest.bases), (one.step, sorted(there))
    chains.assert_sound(root)


def check_all(start: Start, tmp_path: Path, step: int, every: int, *, both: bool) -> None:
    runs = iter(range(10_000))

    def check(point: Point) -> None:
        root = tmp_path / f"run-{next(runs)}"
        trainer = trained(start, root, step - 1)
        old = writer_of(trainer)
        with hit(trainer, point, "signal=KILL"):
            trainer.say(step)
            if both:
                await_end(old)
                trainer.kill()
            else:
                assert trainer.hear_dict(timeout_s=20)["state"] == "failed"
        if both:
            assert trainer.join() == -9
        else:
            await_end(old)
            trainer.say(step + 1)
            assert trainer.hear_dict()["state"] == "committed"
            trainer.finish()
        assert_no_child_lacks_its_base(root)
        newest = max(chains.by_step(root))
        assert newest in ({step - 1, step} if both else {step + 1})
        again = start(chain_program.resume, str(root), newest + 1)
        found = again.hear_dict()
        assert (found["step"], found["differs"]) == (newest, [])
        for _ in range(2):
            assert again.hear_dict()["state"] == "committed"
        again.finish()
        assert_no_child_lacks_its_base(root)
        assert chains.bases(root)[newest + 2] == (newest + 1,)
        assert chain_program.differences(load_generation(root), newest + 2) == []

    points = points_of(start, tmp_path, step)
    collect(points[step % every :: every], check)


def test_a_chain_is_what_is_saved(start: Start, tmp_path: Path) -> None:
    trained(start, tmp_path, 3).finish()
    assert chains.bases(tmp_path) == {1: (), 2: (1,), 3: (1, 2)}
    trained(start, tmp_path / "more", 4).finish()
    assert chains.bases(tmp_path / "more") == {4: ()}


@pytest.mark.parametrize("step", [CHILD, FRESH])
def test_sigkill_of_both_at_some_calls_leaves_whole_chains(
    start: Start, tmp_path: Path, step: int
) -> None:
    check_all(start, tmp_path, step, 9, both=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("both", [True, False], ids=["both", "writer"])
@pytest.mark.parametrize("step", [CHILD, FRESH])
def test_sigkill_at_every_call_leaves_whole_chains(
    start: Start, tmp_path: Path, step: int, both: bool
) -> None:
    check_all(start, tmp_path, step, 1, both=both)
