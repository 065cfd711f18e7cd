"""What a rank believes of its line, of whose commits rank 0 alone knows at once."""

from __future__ import annotations

from pathlib import Path

from tests import samples
from torch_ckpt.manifest.layout import folder_name
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.line import Line

FULL_EVERY = 8


def job_of(store: LocalStore, step: int) -> Job:
    return Job(
        root=store.url,
        folder=folder_name(step),
        step=step,
        attempt=f"{step:08x}",
        run="run-a",
        rank=1,
        world_size=2,
        created="",
        pieces=[],
        raw_bytes=0,
    )


class Rank:
    """Rank 1 of two, whose saves rank 0 commits or does not."""

    def __init__(self, root: Path) -> None:
        self._store, self._line = LocalStore(str(root)), Line()

    def save(self, step: int, *, committed: bool = True) -> bool:
        """Give a vote; whether the save after it may lose something."""
        job = job_of(self._store, step)
        self._line.look(job, self._store, lossy=True)
        self._line.add(job, ())
        anchors = self._line.will_go_on(job, None, FULL_EVERY)
        if committed:
            samples.commit(self._store, step, attempt=job.attempt)
        return anchors


def test_a_vote_in_vain_is_doubted_for_a_while_and_not_for_ever(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    assert [rank.save(step) for step in (1, 2)] == [False, True]
    rank.save(3, committed=False)
    assert [rank.save(step) for step in (4, 5, 6, 7)] == [False, False, True, True]


def test_a_vote_that_is_counted_late_counts(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    assert [rank.save(step) for step in (1, 2)] == [False, True]
    rank.save(3, committed=False)
    store = LocalStore(str(tmp_path))
    assert not rank.save(4, committed=False), "neither is committed yet"
    for step in (3, 4):
        samples.commit(store, step, attempt=f"{step:08x}")
    assert rank.save(5)
