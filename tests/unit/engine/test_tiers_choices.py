"""The tiers hold what they should however a run saves, and whatever else lies there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.tiered import resume, state_of, steps_in, tiers, train
from torch_ckpt import KeepLast


@pytest.mark.parametrize(
    ("options", "root"),
    [
        ({"slabs": 1}, [3]),
        ({"mode": "sync"}, [3]),
        ({"slabs": 1, "mode": "sync", "on_busy": "skip"}, [3]),
        ({"keep": None}, [1, 2, 3]),
        ({"keep": None, "keep_archive": KeepLast(1)}, [1, 2, 3]),
    ],
    ids=["one slab", "sync", "one slab, sync, skip", "keep all", "keep all, archive one"],
)
def test_tiers_hold_what_they_should_however_a_run_saves(
    tmp_path: Path, options: dict[str, Any], root: list[int]
) -> None:
    train(tmp_path, 1, 2, **options)
    train(tmp_path, 3, **options)
    archived = [3] if "keep_archive" in options else [1, 2, 3]
    assert steps_in(tmp_path / "root") == root
    assert steps_in(tmp_path / "archive") == archived
    assert steps_in(tmp_path / "cache") == [3]
    for name in ("cache", "root"):
        assert resume(tmp_path, **options) == (3, name)
        shutil.rmtree(tmp_path / "cache" if name == "cache" else tmp_path / "root")
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert resume(tmp_path, **options) == (3, "archive")


@pytest.mark.parametrize("archive", [None, "archive"])
def test_what_is_not_ours_in_a_folder_stays(tmp_path: Path, archive: str | None) -> None:
    """Beside the tiers' own files, in each of them: files, folders, and what looks like a step."""
    foreign = []
    for tier in ("root", "archive", "cache"):
        for name in ("notes.txt", "runs/events", "step-0000000001/mine.bin", "step-0000000009/x"):
            foreign.append(tmp_path / tier / name)
            foreign[-1].parent.mkdir(parents=True, exist_ok=True)
            foreign[-1].write_text(name)
    place = None if archive is None else tmp_path / archive
    with tiers(tmp_path, archive=place, keep_archive=KeepLast(1)) as checkpointer:
        checkpointer.resume(state_of(0))
        for step in (1, 2, 3):
            pending = checkpointer.save(state_of(step), step)
            pending.wait("archived" if archive else "committed", 60)
    assert steps_in(tmp_path / "root") == steps_in(tmp_path / "cache") == [3]
    assert steps_in(tmp_path / "archive") == ([3] if archive else [])
    assert [path.read_text() for path in foreign] == 3 * [
        path.relative_to(tmp_path / "root").as_posix() for path in foreign[:4]
    ]
    assert sorted(path.name for path in (tmp_path / "root" / "step-0000000001").iterdir()) == [
        "mine.bin"
    ]
