"""Codes of moments outlive their trainer, and never become a generation with their writer dead."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests import chains
from tests.crash import quantising_program as program
from tests.crash.conftest import Start
from tests.crash.run import await_end
from tests.moments import stored_digests


def test_a_trainer_killed_right_after_the_hand_over_loses_nothing(
    start: Start, tmp_path: Path
) -> None:
    trainer = start(program.stage, str(tmp_path))
    writer = trainer.hear_dict()["writer"]
    said = trainer.hear_dict()
    assert said["copied"] < said["bytes"]
    trainer.kill()
    assert trainer.join() == -9
    os.kill(writer, signal.SIGCONT)  # it makes values of the codes only now
    await_end(writer)
    found = chains.by_step(tmp_path)
    assert sorted(found) == [1, 2]
    assert "lossy" in found[2].tags
    assert stored_digests(tmp_path, 2) == said["digests"]
    chains.assert_sound(tmp_path)


def test_a_writer_killed_at_any_moment_leaves_whole_generations_alone(
    start: Start, tmp_path: Path
) -> None:
    trainer = start(program.train, str(tmp_path))
    wanted: dict[int, dict[str, str]] = {}
    quantised = 0

    def save(step: int, kill_after_s: float | None) -> str:
        nonlocal quantised
        trainer.say(step)
        said = trainer.hear_dict()
        if kill_after_s is not None:
            quantised += said["quantised"]
            time.sleep(kill_after_s)
            os.kill(said["writer"], signal.SIGKILL)
        trainer.say()
        outcome = trainer.hear_dict()
        if outcome["state"] == "committed" and said["quantised"]:
            wanted[step] = outcome["digests"]
        return outcome["state"]

    for number, delay in enumerate((0.0, 0.002, 0.01, 0.03, 0.1)):
        first = 10 * number + 1
        assert save(first, None) == "committed"
        save(first + 1, delay)
        # Where its commit came just before the kill, the trainer may not know yet that it died.
        while save(first + 2, None) != "committed":
            first += 1
    trainer.finish()
    assert quantised == 5
    found = chains.by_step(tmp_path)
    assert all("lossy" in found[step].tags for step in wanted)
    for step, digests in wanted.items():
        assert stored_digests(tmp_path, step) == digests
    chains.assert_sound(tmp_path)
