"""Writer and trainer are killed at a request of a promotion or of a prune: nothing is lost.

Every case is a real trainer whose archive is a bucket behind a proxy, which kills at the n-th
request. What is committed afterwards can be read back whole, the same command run again completes
the archive, and a shard that had arrived does not travel twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.s3.archived import Run, ask, is_over, kill, until
from tests.s3.programs import SIZE
from tests.s3.rules import Kill, Point
from torch_ckpt.generations.retention import KeepLast

WHO = ["writer", "trainer", "both"]
SMALL = 2000
ROOT = "^/ckpt/?$"
OF_A_PRUNE: dict[str, Any] = {
    "path": f"step-0000000001/|{ROOT}",
    "query": "^(delete.*)?$",
}
PROMOTION, PRUNE = 23, 9
"""Requests of each, and a few more: one that never comes kills nobody."""


def victim(who: str, trainer_pid: int, writer_pid: int) -> Callable[[], int]:
    """Kills all but the last one of those who are to die, whose pid it gives."""

    def pid() -> int:
        if who == "both":
            kill(trainer_pid)  # first: it would start another writer
        return trainer_pid if who == "trainer" else writer_pid

    return pid


def cut(run: Run, who: str, nth: int, at: Point, *, small: bool = False) -> int:
    """Save step 1 and be killed at a request of its promotion; the place in the log."""
    trainer, said = run.start(size=SIZE)
    began = len(run.requests())
    rule = run.proxy.on(
        Kill(pid=victim(who, trainer.pid, said["writer"]), at=at), path=run.prefix, nth=nth
    )
    trainer.say(("save", 1))
    trainer.hear_dict() if who == "writer" else None
    dead = {"writer": [said["writer"]], "trainer": [trainer.pid]}
    dying = dead.get(who, [trainer.pid, said["writer"]])
    until(lambda: rule.struck > 0 or ended(run, began))
    if not rule.struck:
        kill(*dying)  # after the last request
    until(lambda: all(map(is_over, dying)))
    if who == "writer":
        kill(trainer.pid)
    trainer.join()
    return began


def ended(run: Run, began: int) -> bool:
    """Whether the archive has step 1 and nothing is asked any more."""
    return any(one.query.startswith("uploads&") for one in run.requests(began)[-3:])


def take_up(run: Run, whole: dict[str, int]) -> None:
    """The same command again: what is missing comes, and what is there does not travel again."""
    after = len(run.requests())
    resumed = run.train()
    assert (resumed["step"], resumed["differs"]) == (1, [])
    assert run.steps() == [1]
    run.assert_sound()
    for name in whole:
        assert run.sent(name, after) == 0, "it had arrived"
    assert run.tidy()


def promotion_cut_at(run: Run, who: str, nth: int, at: Point, codec: str = "raw") -> None:
    run.options = {"archive_codec": codec}
    cut(run, who, nth, at)
    if who == "trainer":
        run.await_writers()  # which finish what they can
        assert run.steps() == [1]
    run.assert_sound()
    assert run.own_steps() == [1]
    take_up(run, run.shards())


@pytest.mark.parametrize(
    ("who", "nth", "at"),
    [
        ("writer", 5, "answer"),  # the claim is ours, and nobody says so
        ("writer", 12, "answer"),  # the shard is there
        ("both", 18, "head"),  # all but the manifest is there
        ("trainer", 9, "upload"),
    ],
)
def test_a_promotion_that_is_cut_is_taken_up(run: Run, who: str, nth: int, at: Point) -> None:
    promotion_cut_at(run, who, nth, at)


def test_an_encoded_shard_that_arrived_before_the_cut_does_not_travel_again(run: Run) -> None:
    run.options = {"archive_codec": "zstd"}
    trainer, said = run.start(size=SIZE)
    rule = run.proxy.on(
        Kill(pid=victim("both", trainer.pid, said["writer"])),
        method="PUT",
        path="/step-0000000001/rank-.*json$",
    )
    trainer.say(("save", 1))
    until(lambda: rule.struck > 0)
    until(lambda: all(map(is_over, (trainer.pid, said["writer"]))))
    trainer.join()
    whole = run.shards()
    assert len(whole) == 1
    take_up(run, whole)
    assert run.shards() == whole


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("nth", range(1, PROMOTION))
def test_a_promotion_cut_at_any_request_is_taken_up(run: Run, nth: int, codec: str) -> None:
    promotion_cut_at(run, WHO[nth % 3], nth, "head", codec)


def prune_cut_at(run: Run, who: str, at: Point, **where: Any) -> None:
    """Killed while the archive lets step 1 go, since step 2 has come."""
    run.options = {"keep_archive": KeepLast(1), "size": SMALL}
    trainer, said = run.start()
    assert ask(trainer, "save", 1)["state"] == "committed"
    assert ask(trainer, "archived", 1)["error"] is None
    rule = run.proxy.on(Kill(pid=victim(who, trainer.pid, said["writer"]), at=at), **where)
    dying = [trainer.pid] if who == "trainer" else [said["writer"]]
    trainer.say(("save", 2))
    until(lambda: rule.struck > 0 or run.steps() == [2])
    kill(*dying, trainer.pid)
    until(lambda: all(map(is_over, dying)))
    trainer.join()
    run.await_writers()
    run.assert_sound()
    assert run.steps() in ([1], [1, 2], [2])
    assert run.own_steps()[-1] == 2
    resumed = run.train(3)
    assert (resumed["step"], resumed["differs"]) == (2, [])
    assert run.steps() == run.own_steps() == [3]
    run.assert_sound()
    assert run.tidy()


@pytest.mark.parametrize(
    ("who", "at", "where"),
    [
        ("writer", "answer", {"method": "DELETE"}),  # the manifest is gone
        ("both", "head", {"method": "POST", "query": "^delete"}),
    ],
)
def test_a_prune_of_the_archive_that_is_cut_is_taken_up(
    run: Run, who: str, at: Point, where: dict[str, Any]
) -> None:
    prune_cut_at(run, who, at, **where)


@pytest.mark.slow
@pytest.mark.parametrize("nth", range(1, PRUNE))
def test_a_prune_of_the_archive_cut_at_any_request_is_taken_up(run: Run, nth: int) -> None:
    prune_cut_at(run, WHO[nth % 3], "head" if nth % 2 else "answer", nth=nth, **OF_A_PRUNE)
