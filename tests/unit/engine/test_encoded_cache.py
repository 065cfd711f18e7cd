"""A cache of generations that are encoded: in the root, or only in the archive."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import chains
from tests.unit.engine.tiered import resume, state_of, steps_in, tiers, train

LINE: dict[str, Any] = {"codec": "zstd", "incremental": True, "full_every": 2}


def shards(root: Path) -> set[str]:
    return {f"{p.parent.name}/{p.name}" for p in root.glob("*/*.blocks")}


def grown(step: int) -> dict[str, Any]:
    """One tensor stays, the other one changes."""
    return {**state_of(0), "small": state_of(step)["large"][:7].clone(), "step": step}


def save(tmp_path: Path, *steps: int, **options: Any) -> None:
    with tiers(tmp_path, **{**LINE, **options}) as checkpointer:
        for step in steps:
            checkpointer.save(grown(step), step).wait("archived", 60)


def assert_resumed(tmp_path: Path, step: int, tier: str) -> None:
    state = grown(0)
    with tiers(tmp_path, **LINE) as checkpointer:
        found = checkpointer.resume(state)
    assert found is not None
    assert (found.step, Path(found.url).parent.name) == (step, tier)
    chains.assert_same(state, grown(step))


def test_an_encoded_share_is_cached_with_what_it_builds_on_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    assert set(chains.bases(tmp_path / "root")[3]) <= {1, 2}
    assert steps_in(tmp_path / "cache") == [*chains.bases(tmp_path / "root")[3], 3]
    assert shards(tmp_path / "cache") <= shards(tmp_path / "root")
    for shard in (tmp_path / "root").glob("*/*.blocks"):
        shard.rename(shard.with_suffix(".away"))
    assert_resumed(tmp_path, 3, "cache")


def test_a_full_generation_frees_the_room_of_the_line_before_it(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    assert chains.bases(tmp_path / "root")[4] == ()
    assert steps_in(tmp_path / "cache") == [4]
    assert len(shards(tmp_path / "cache")) == 1


def test_a_cache_that_was_lost_gets_all_that_the_next_save_builds_on(tmp_path: Path) -> None:
    with tiers(tmp_path, **LINE) as checkpointer:
        checkpointer.save(grown(1), 1).wait("archived", 60)
        shutil.rmtree(tmp_path / "cache")
        checkpointer.save(grown(2), 2).wait("archived", 60)
    assert chains.bases(tmp_path / "root")[2] == (1,)
    assert shards(tmp_path / "cache") == shards(tmp_path / "root")
    assert steps_in(tmp_path / "cache") == [1, 2]


def test_a_cache_without_a_borrowed_shard_is_not_used(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    next((tmp_path / "cache").glob("step-0000000001/*.blocks")).unlink()
    assert_resumed(tmp_path, 2, "root")


@pytest.mark.parametrize("lost", ["cache alone", "root too"])
def test_reading_an_encoded_generation_fills_the_cache(tmp_path: Path, lost: str) -> None:
    where = {"codec": "zstd"} if lost == "cache alone" else {"archive_codec": "zstd"}
    train(tmp_path, 1, 2, **where)
    shutil.rmtree(tmp_path / "cache")
    if lost == "root too":
        shutil.rmtree(tmp_path / "root")
    assert resume(tmp_path, **where) == (2, "archive" if lost == "root too" else "root")
    assert len(shards(tmp_path / "cache")) == 1
    assert resume(tmp_path, **where) == (2, "cache")
