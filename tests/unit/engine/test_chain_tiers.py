"""Chains in two tiers: bases are promoted first, and no tier shows a child without its base."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import chains
from tests.chains import assert_same, assert_sound
from torch_ckpt import Checkpointer, KeepLast, load_generation
from torch_ckpt.cli.main import run

SIZE = 1 << 18


def state_at(step: int) -> dict[str, Any]:
    return {
        "frozen": torch.arange(float(SIZE)),
        "w": torch.linspace(-1, 1, SIZE) + step * 1e-4,
    }


def checkpointer(tmp_path: Path, **options: Any) -> Checkpointer:
    return Checkpointer(
        tmp_path / "run",
        **{"archive": tmp_path / "archive", "incremental": True, "full_every": 2, **options},
    )


def assert_whole(root: Path, steps: list[int]) -> None:
    there = chains.by_step(root)
    assert sorted(there) == steps
    for one in there.values():
        assert there.keys() >= set(one.manifest.bases)
    assert_sound(root)


def test_both_tiers_keep_the_chain_of_the_newest(tmp_path: Path) -> None:
    with checkpointer(tmp_path, keep=KeepLast(1), keep_archive=KeepLast(1)) as saver:
        for step in range(1, 7):
            saver.save(state_at(step), step).wait("archived", 60)
    for tier in ("run", "archive"):
        assert_whole(tmp_path / tier, [4, 5, 6])
    assert (tmp_path / "archive" / "LATEST").read_text() == "step-0000000006\n"


def test_a_run_goes_on_from_the_archive_alone(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as saver:
        for step in (1, 2, 3):
            saver.save(state_at(step), step).wait("archived", 60)
    shutil.rmtree(tmp_path / "run")
    state = state_at(0)
    with checkpointer(tmp_path, keep=None) as saver:
        found = saver.resume(state)
        assert found is not None
        assert found.step == 3
        assert_same(state, state_at(3))
        for step in (4, 5):
            saver.save(state_at(step), step).wait("archived", 60)
    assert chains.bases(tmp_path / "run") == {4: (), 5: (4,)}
    assert_whole(tmp_path / "archive", [1, 2, 3, 4, 5])


def test_a_child_waits_for_a_base_that_cannot_be_promoted_yet(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    obstacle = tmp_path / "archive" / "step-0000000001"
    obstacle.touch()
    with checkpointer(tmp_path, keep=KeepLast(1), archive_timeout_s=0) as saver:
        for step in (1, 2, 3):
            saver.save(state_at(step), step).wait()
        time.sleep(0.5)  # its promotions have their chance
        assert_whole(tmp_path / "run", [1, 2, 3])  # the archive has none of them
    assert chains.by_step(tmp_path / "archive") == {}
    obstacle.unlink()
    with checkpointer(tmp_path, keep=KeepLast(1)) as saver:
        assert saver.resume(state_at(0)) is not None
        saver.save(state_at(4), 4).wait("archived", 60)
    assert_whole(tmp_path / "archive", [1, 2, 3, 4])
    shutil.rmtree(tmp_path / "run")
    for step in (1, 2, 3, 4):
        assert_same(load_generation(tmp_path / "archive", step), state_at(step))


def test_a_base_stays_in_the_archive_while_what_builds_on_it_is_on_its_way(tmp_path: Path) -> None:
    obstacle = tmp_path / "archive" / "step-0000000004"
    options = {"keep": None, "keep_archive": KeepLast(1), "full_every": 8}
    with checkpointer(tmp_path, **options) as saver:
        for step in (1, 2, 3):
            saver.save(state_at(step), step).wait("archived", 60)
        obstacle.touch()
        saver.save(state_at(4), 4).wait()
        # Whole by itself and as new, so a rule that counts what has arrived drops the chain.
        alone = saver.save(state_at(4), 4, folder="best", tags=["permanent"])
        alone.wait("archived", 60)
        obstacle.unlink()
        saver.save(state_at(5), 5).wait("archived", 60)
    committed = chains.Catalog(chains.store_at(tmp_path / "archive")).committed()
    assert {one.folder[-4:]: one.manifest.bases for one in committed} == {
        "0001": (),
        "0002": (1,),
        "0003": (1, 2),
        "0004": (1, 2, 3),
        "best": (),
        "0005": (1, 2, 3, 4),
    }
    assert_sound(tmp_path / "archive")


def test_a_prune_by_hand_leaves_the_archive_the_bases_of_what_it_has_yet_to_get(
    tmp_path: Path,
) -> None:
    with checkpointer(tmp_path, archive=None, keep=None) as saver:
        for step in (1, 2, 3, 4):
            saver.save(state_at(step), step).wait()
    ahead, behind = tmp_path / "run", tmp_path / "archive"
    shutil.copytree(ahead, behind, ignore=shutil.ignore_patterns("step-0000000003"))
    rules = ["--keep", "last=1", "--keep-archive", "last=1,every=3", "--yes"]
    assert run(["prune", str(ahead), "--archive", str(behind), *rules]) == 0
    assert_whole(ahead, [1, 2, 3, 4])
    assert_whole(behind, [1, 2, 4])


def test_a_base_that_somebody_removed_from_the_archive_is_missed_before_the_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"keep": None, "full_every": 8, "archive_timeout_s": 0}
    with checkpointer(tmp_path, **options) as saver:
        saver.save(state_at(1), 1).wait("archived", 60)
        shutil.rmtree(tmp_path / "archive" / "step-0000000001")
        saver.save(state_at(2), 2).wait()
        deadline = time.monotonic() + 60
        while "on which it builds, is not there" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert chains.by_step(tmp_path / "archive") == {}
    with checkpointer(tmp_path, **options) as saver:
        assert saver.resume(state_at(0)) is not None
        saver.save(state_at(3), 3).wait("archived", 60)
    assert_whole(tmp_path / "archive", [1, 2, 3])


def test_a_promotion_that_was_cut_is_taken_up_bases_first(tmp_path: Path) -> None:
    with checkpointer(tmp_path, archive=None, keep=None) as saver:
        for step in range(1, 7):
            saver.save(state_at(step), step).wait()
    slow = {"bandwidth_limit": 2 << 20, "archive_timeout_s": 0, "keep": None}
    for _ in range(3):
        with checkpointer(tmp_path, **slow) as saver:
            assert saver.resume(state_at(0)) is not None
            time.sleep(0.5)
        if (tmp_path / "archive").exists():
            there = chains.by_step(tmp_path / "archive")
            assert_whole(tmp_path / "archive", sorted(there))
    with checkpointer(tmp_path, keep=None) as saver:
        assert saver.resume(state_at(0)) is not None
        saver.save(state_at(7), 7).wait("archived", 60)
    assert_whole(tmp_path / "archive", [1, 2, 3, 4, 5, 6, 7])


def test_damage_of_a_base_in_one_tier_is_made_good_by_the_other(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as saver:
        for step in (1, 2, 3):
            saver.save(state_at(step), step).wait("archived", 60)
    (shard,) = (tmp_path / "run" / "step-0000000001").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    state = state_at(0)
    with checkpointer(tmp_path) as saver:
        found = saver.resume(state)
    assert found is not None
    assert found.step == 3
    assert_same(state, state_at(3))


def test_a_base_that_only_the_primary_tier_has_lost_is_made_good_by_the_archive(
    tmp_path: Path,
) -> None:
    with checkpointer(tmp_path) as saver:
        for step in (1, 2, 3):
            saver.save(state_at(step), step).wait("archived", 60)
    shutil.rmtree(tmp_path / "run" / "step-0000000001")
    state = state_at(0)
    with checkpointer(tmp_path) as saver:
        found = saver.resume(state)
    assert found is not None
    assert found.step == 3
    assert_same(state, state_at(3))
