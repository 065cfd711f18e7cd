"""A root in a bucket is pruned while an archive elsewhere holds the history, and that is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.s3.archived import Run, ask, is_over, kill, until
from tests.s3.rules import Kill, Point, Request
from tests.s3.servers import options_for
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.store import Store, open_store

STEP_1: dict[str, Any] = {"path": "step-0000000001|^/ckpt/?$", "query": "^(delete.*)?$"}
REQUESTS = 7
"""Of a prune that lets step 1 go, and a few more: one that never comes kills nobody."""


class Turned:
    """A run whose root is the bucket, and whose archive is a folder."""

    def __init__(self, run: Run) -> None:
        self._run = run
        run.options = {
            "archive": str(run.root),
            "archive_options": {},
            "storage_options": options_for(run.proxy.url),
            "size": 2000,
        }
        self.archive = open_store(str(run.root))

    @property
    def root(self) -> Store:
        """Past the proxy."""
        return self._run.archive

    def steps(self, store: Store) -> list[int]:
        return sorted(one.step for one in Catalog(store).committed())

    def start(self) -> tuple[Any, dict[str, Any]]:
        return self._run.start(root=self._run.url)

    def assert_sound(self) -> None:
        for store in (self.root, self.archive):
            committed, damaged = Catalog(store).scan()
            assert damaged == []
            assert all(verify(store, one).ok for one in committed)


def told_of_its_commit(request: Request) -> bool:
    """Whether this is step 2's manifest, and its writer has heard that it is there.

    Reads for the promotion of step 1 may come so late that the kill is before this.
    """
    return (request.method, request.status) == ("PUT", 200) and request.key.endswith(
        "step-0000000002/manifest.json"
    )


def prune_cut_at(run: Run, who: str, at: Point, **where: Any) -> None:
    turned = Turned(run)
    trainer, said = turned.start()
    assert ask(trainer, "save", 1)["state"] == "committed"
    assert ask(trainer, "archived", 1)["error"] is None

    first, writer = trainer.pid, said["writer"]

    def victim() -> int:
        if who == "both":
            kill(first)  # before the writer, of which it would start another one
        return writer

    rule = run.proxy.on(Kill(pid=victim, at=at), **where)
    trainer.say(("save", 2))
    until(lambda: rule.struck > 0 or turned.steps(turned.root) == [2])
    kill(said["writer"], trainer.pid)
    until(lambda: all(map(is_over, (said["writer"], trainer.pid))))
    trainer.join()
    run.await_writers()
    committed = {1} | {2 for one in run.requests() if told_of_its_commit(one)}
    run.proxy.clear()
    turned.assert_sound()
    assert committed <= {*turned.steps(turned.root), *turned.steps(turned.archive)}
    trainer, said = turned.start()
    assert said["differs"] == []
    assert said["step"] in (1, 2)
    for step in (3, 4):
        assert ask(trainer, "save", step)["state"] == "committed"
        assert ask(trainer, "archived", step)["error"] is None
    trainer.say(None)
    trainer.hear_dict()
    assert trainer.join() == 0
    assert turned.steps(turned.root) == [4]
    # Of a save that was never committed shards may stay until its step is saved again.
    left = {"step-0000000002"} - {f"step-{step:010d}" for step in committed}
    assert {*turned.root.folders()} - left == {"step-0000000004"}, (
        "what the killed prune left is gone"
    )
    assert {1, 3, 4} <= set(turned.steps(turned.archive))
    turned.assert_sound()


@pytest.mark.parametrize(
    ("who", "at", "where"),
    [
        ("writer", "answer", {"method": "DELETE"}),  # the manifest is gone
        pytest.param(
            *("both", "head", {"method": "POST", "query": "^delete"}), marks=pytest.mark.slow
        ),
    ],
)
def test_a_prune_of_the_root_that_is_cut_is_taken_up(
    run: Run, who: str, at: Point, where: dict[str, Any]
) -> None:
    prune_cut_at(run, who, at, **where)


@pytest.mark.slow
@pytest.mark.parametrize("nth", range(1, REQUESTS))
def test_a_prune_of_the_root_cut_at_any_request_is_taken_up(run: Run, nth: int) -> None:
    who = ("writer", "both")[nth % 2]
    prune_cut_at(run, who, "head" if nth % 3 else "answer", nth=nth, **STEP_1)


def test_what_is_not_ours_in_the_prefix_stays_and_disturbs_nothing(
    run: Run, tmp_path: Path
) -> None:
    client, bucket = run.server.client(), run.server.bucket
    foreign = {
        "notes/read me.txt": b"hello",
        "step-0000000001/somebody's.bin": b"1",
        "step-0000000002/": b"",
        "step-0000000003/rank-00000.deadbeef.safetensors": b"half deleted, of another save",
        "step-0000000005/manifest.json": b"{",
        "epoch=1.ckpt": b"a file where folders are",
    }
    for name, body in foreign.items():
        client.put_object(Bucket=bucket, Key=f"{run.prefix}/{name}", Body=body)
    run.options = {"size": 2000, "keep_archive": None}
    run.train(1, 2)
    run.options = {"size": 2000}
    assert run.train(3, 4)["step"] == 2
    assert run.steps() == [1, 2, 3, 4]
    keys = run.server.keys(run.prefix)
    for name in foreign.keys() - {"step-0000000003/rank-00000.deadbeef.safetensors"}:
        assert f"{run.prefix}/{name}" in keys, name
    run.root.rename(tmp_path / "lost")
    resumed = run.train()
    assert (resumed["step"], resumed["differs"]) == (4, [])
