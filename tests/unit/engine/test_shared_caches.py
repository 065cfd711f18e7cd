"""A cache that holds something else than the other tiers: an older save, or another run's."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tests.unit.engine.tiered import resume, state_of, steps_in, tiers
from torch_ckpt import Checkpointer, GenerationNotFound
from torch_ckpt.manifest.layout import shard_name


def test_a_folder_that_was_saved_again_without_the_cache_is_not_loaded_from_it(
    tmp_path: Path,
) -> None:
    root, cache, state = tmp_path / "root", tmp_path / "cache", state_of(0)
    with Checkpointer(root, cache=cache) as checkpointer:
        checkpointer.save(state_of(1), 1, folder="last.ckpt")
    with Checkpointer(root) as checkpointer:
        checkpointer.resume(state_of(0))
        checkpointer.save(state_of(2), 2, folder="last.ckpt")
    assert (cache / "last.ckpt" / "manifest.json").exists()
    with Checkpointer(root, cache=cache) as checkpointer:
        found = checkpointer.load(state, folder="last.ckpt")
    assert (found.step, state["step"]) == (2, 2)


def test_a_folder_is_read_from_the_cache_where_it_is_the_same_or_the_only_one(
    tmp_path: Path,
) -> None:
    with tiers(tmp_path) as checkpointer:
        checkpointer.save(state_of(1), 1, folder="a").wait("archived", 60)
    for lost in ("", "root", "archive"):
        shutil.rmtree(tmp_path / lost / "a" if lost else tmp_path / "none", ignore_errors=True)
        state = state_of(0)
        with tiers(tmp_path) as checkpointer:
            found = checkpointer.load(state, folder="a")
        assert (Path(found.url).parent.name, state["step"]) == ("cache", 1)


def test_a_damaged_manifest_in_the_root_does_not_hide_what_another_tier_has(
    tmp_path: Path,
) -> None:
    with tiers(tmp_path) as checkpointer:
        checkpointer.save(state_of(1), 1, folder="a").wait("archived", 60)
    (tmp_path / "root" / "a" / "manifest.json").write_bytes(b"{")
    state = state_of(0)
    with tiers(tmp_path) as checkpointer:
        assert checkpointer.load(state, folder="a").step == state["step"] == 1


def test_what_another_run_left_in_the_cache_is_neither_resumed_nor_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path / "other", cache=tmp_path / "cache") as checkpointer:
        checkpointer.save(state_of(9), 9)
    with Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(state_of(5), 5)
    assert steps_in(tmp_path / "cache") == [9]
    with tiers(tmp_path) as checkpointer, pytest.raises(GenerationNotFound):
        checkpointer.load(state_of(0), folder="step-0000000009")
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        assert resume(tmp_path) == (5, "root")
    assert "step-0000000009 is of another run" in caplog.text


def test_what_is_in_the_cache_alone_is_resumed_with_a_word_about_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path / "root", cache=tmp_path / "cache") as checkpointer:
        checkpointer.save(state_of(1), 1)
    shutil.rmtree(tmp_path / "root")
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        assert resume(tmp_path, archive=None) == (1, "cache")
    assert "give this one a cache of its own" in caplog.text


@pytest.mark.parametrize("folder", ["epoch=1.ckpt", "step-0000000900"])
def test_what_a_killed_writer_left_in_the_cache_goes_with_the_next_save(
    tmp_path: Path, folder: str
) -> None:
    """Under a user's name, or a step from which the run went back: no later step sweeps it."""
    left = tmp_path / "cache" / folder
    left.mkdir(parents=True)
    (left / shard_name(0, "0123a001")).write_bytes(b"torn")
    (left / "notes.txt").write_bytes(b"of a person")
    with Checkpointer(tmp_path / "root", cache=tmp_path / "cache") as checkpointer:
        checkpointer.save(state_of(5), 5)
    assert [path.name for path in left.iterdir()] == ["notes.txt"]
    assert steps_in(tmp_path / "cache") == [5]
