"""A rank that could not read its share sends it after all, once rank 0 finds it whole."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

from tests import samples
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.writer.tier_options import TierOptions
from torch_ckpt.writer.tiers import Tiers


def tiers_of_two(tmp_path: Path, rank: int) -> tuple[Tiers, queue.Queue[dict[str, Any]]]:
    options = TierOptions(world_size=2, archive=str(tmp_path / "archive"))
    said = queue.Queue[dict[str, Any]]()
    store = LocalStore(str(tmp_path / "primary"))
    return Tiers(options, rank=rank, primary=lambda: store, report=said.put), said


def test_a_share_that_could_not_be_read_for_a_while_is_archived_in_the_same_run(
    tmp_path: Path,
) -> None:
    one = samples.commit(LocalStore(str(tmp_path / "primary")), 7, ranks=2)
    (shard,) = Path(one.url).glob("rank-00001*.safetensors")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    second, said_by_second = tiers_of_two(tmp_path, 1)
    try:
        assert "it is damaged" in said_by_second.get(timeout=60)["reason"]
        shard.write_bytes(whole)
        first, said_by_first = tiers_of_two(tmp_path, 0)
        try:
            assert said_by_first.get(timeout=120)["reason"] is None
            assert said_by_second.get(timeout=60)["reason"] is None
        finally:
            first.finish(lambda: True)
    finally:
        second.finish(lambda: True)
    assert verify(LocalStore(str(tmp_path / "archive")), one).ok


def test_a_share_that_is_damaged_is_refused_once_and_given_up(tmp_path: Path) -> None:
    one = samples.commit(LocalStore(str(tmp_path / "primary")), 7, ranks=2)
    (shard,) = Path(one.url).glob("rank-00001*.safetensors")
    shard.write_bytes(bytes(shard.stat().st_size))
    second, said_by_second = tiers_of_two(tmp_path, 1)
    try:
        assert "it is damaged" in said_by_second.get(timeout=60)["reason"]
        first, said_by_first = tiers_of_two(tmp_path, 0)
        try:
            assert "rank 1 does not send its share" in said_by_first.get(timeout=120)["reason"]
        finally:
            first.finish(lambda: True)
    finally:
        second.finish(lambda: True)
    assert said_by_second.empty()
