"""What a promotion makes of a file that is missing: it matters in which tier."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from tests import samples
from tests.faults import FaultyStore
from tests.unit.writer.conftest import rank_of_two
from torch_ckpt.errors import StorageError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.index import FRESH, write_index
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.storage.store import open_store
from torch_ckpt.writer.promote import Promoter, PromotionRefused
from torch_ckpt.writer.setbacks import Setbacks
from torch_ckpt.writer.tier_options import TierOptions
from torch_ckpt.writer.tiers import Tiers


def promoter_of(primary: LocalStore, archive: FaultyStore) -> Promoter:
    return Promoter(primary, archive, rank=0, world_size=1, pace=lambda count: None)


@pytest.mark.parametrize("operation", ["upload", "read", "entries", "make_folder", "put"])
def test_what_the_archive_lost_is_sent_again(
    primary: LocalStore, archive: FaultyStore, operation: str
) -> None:
    one = samples.commit(primary, 7)
    promoter = promoter_of(primary, archive)
    archive.fail(operation, nth=None, error=FileNotFoundError("not here"))
    with pytest.raises(StorageError, match="not here"):
        promoter.send(one)
    archive.release()
    promoter.send(one)
    assert promoter.complete(one)
    promoter.commit(one)
    assert verify(archive, one).ok


def test_what_left_the_primary_tier_is_not_sent(primary: LocalStore, archive: FaultyStore) -> None:
    one = samples.commit(primary, 7)
    promoter = promoter_of(primary, archive)
    Catalog(primary).delete(one)
    with pytest.raises(PromotionRefused, match="removed before it was promoted") as caught:
        promoter.send(one)
    assert not caught.value.damage


def test_what_the_primary_tier_lost_a_file_of_is_damaged(
    primary: LocalStore, archive: FaultyStore
) -> None:
    one = samples.commit(primary, 7)
    (shard,) = Path(primary.url, one.folder).glob("*.safetensors")
    shard.unlink()
    with pytest.raises(PromotionRefused, match=f"{shard.name} is not there") as caught:
        promoter_of(primary, archive).send(one)
    assert caught.value.damage


def test_one_that_always_fails_comes_last_and_then_less_often(primary: LocalStore) -> None:
    waiting: list[Generation] = [samples.commit(primary, step) for step in (3, 2, 1)]
    setbacks, bad = Setbacks(), waiting[0]
    assert setbacks.begin(waiting) == waiting
    assert not setbacks.failed(bad, StorageError("bad"))
    setbacks.went()
    held_back = setbacks.end()
    assert held_back is not None
    assert str(held_back[0]) == "bad"
    assert setbacks.begin(waiting) == waiting[1:]
    setbacks.over(bad.id)
    assert setbacks.begin(waiting) == waiting


def test_an_archive_that_takes_nothing_is_not_asked_for_every_generation(
    primary: LocalStore,
) -> None:
    waiting = [samples.commit(primary, step) for step in (3, 2, 1)]
    setbacks = Setbacks()
    tried = []
    for one in setbacks.begin(waiting):
        tried.append(one)
        if setbacks.failed(one, StorageError("down")):
            break
    with pytest.raises(StorageError, match="down"):
        setbacks.end()
    assert tried == waiting[:2]
    assert setbacks.begin(waiting) == [waiting[2], *waiting[:2]]


def test_a_share_that_will_not_come_ends_the_wait_for_it(
    primary: LocalStore, archive: FaultyStore
) -> None:
    one = samples.commit(primary, 7, ranks=2)
    (shard,) = Path(primary.url, one.folder).glob("rank-00001*.safetensors")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    first, second = (rank_of_two(primary, archive, rank) for rank in (0, 1))
    first.send(one)
    assert not first.complete(one)
    with pytest.raises(PromotionRefused):
        second.send(one)
    with pytest.raises(PromotionRefused, match=r"rank 1 does not send its share: .*SHA-256"):
        first.complete(one)
    shard.write_bytes(whole)
    second.send(one)  # as a later run does
    assert first.complete(one)
    first.commit(one)
    assert verify(archive, one).ok


def note_by(archive: FaultyStore, one: Generation, rank: int) -> None:
    """What a rank of an earlier run left, or of this one."""
    archive.make_folder(one.folder)
    archive.put(f"{one.folder}/rank-{rank:05d}.{one.manifest.attempt}.failed", b"it is damaged")


def test_what_ranks_of_a_larger_run_refused_does_not_hold_up_a_smaller_one(
    primary: LocalStore, archive: FaultyStore
) -> None:
    one = samples.commit(primary, 7, ranks=2)
    note_by(archive, one, 1)
    alone = promoter_of(primary, archive)
    alone.send(one)
    assert alone.complete(one)
    alone.commit(one)
    assert [
        name for name in Path(archive.url, one.folder).iterdir() if ".failed" in name.name
    ] == []


def test_what_a_rank_of_an_earlier_run_refused_does_not_end_the_wait_for_it(
    primary: LocalStore, archive: FaultyStore
) -> None:
    one = samples.commit(primary, 7, ranks=2)
    note_by(archive, one, 1)
    first, second = (rank_of_two(primary, archive, rank) for rank in (0, 1))
    first.send(one)  # the first to come, and the other rank's share is whole by now
    assert not first.complete(one)
    second.send(one)
    assert first.complete(one)
    first.commit(one)
    assert verify(archive, one).ok
    assert not [*Path(archive.url, one.folder).glob("*.failed")]


@pytest.mark.parametrize("damage", ["flipped", "shorter", "gone", "part"])
def test_what_a_rank_refused_and_is_damaged_still_ends_the_wait_for_it(
    primary: LocalStore, archive: FaultyStore, damage: str
) -> None:
    one = samples.commit(primary, 7, ranks=2)
    kind = "json" if damage == "part" else "safetensors"
    (file,) = Path(primary.url, one.folder).glob(f"rank-00001*.{kind}")
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(whole[:-1] + (b"" if damage == "shorter" else bytes([whole[-1] ^ 1])))
    note_by(archive, one, 1)
    first = rank_of_two(primary, archive, 0)
    first.send(one)
    with pytest.raises(PromotionRefused, match="rank 1 does not send its share: it is damaged"):
        first.complete(one)


def test_a_note_of_a_share_that_came_all_the_same_goes_before_the_commit(
    primary: LocalStore, archive: FaultyStore
) -> None:
    one = samples.commit(primary, 7, ranks=2)
    first, second = (rank_of_two(primary, archive, rank) for rank in (0, 1))
    second.send(one)
    first.send(one)
    note_by(archive, one, 1)
    assert first.complete(one)
    first.commit(one)
    assert not [*Path(archive.url, one.folder).glob("*.failed")]


def test_a_commit_leaves_alone_what_other_ranks_send_into_the_same_folder(
    primary: LocalStore, archive: FaultyStore
) -> None:
    older = samples.commit(primary, 1, ranks=2, folder="last.ckpt", attempt="0123a001")
    first, second = (rank_of_two(primary, archive, rank) for rank in (0, 1))
    first.send(older)
    second.send(older)
    newer = samples.commit(primary, 2, ranks=2, folder="last.ckpt", attempt="0123a002")
    second.send(newer)
    assert first.complete(older)
    first.commit(older)
    first.send(newer)
    assert first.complete(newer)
    first.commit(newer)
    assert verify(archive, newer).ok
    names = {path.name for path in Path(archive.url, "last.ckpt").iterdir()}
    assert not any("0123a001" in name for name in names), names


def test_what_an_index_spoke_for_in_a_remote_root_is_archived_too(tmp_path: Path) -> None:
    root, said = open_store(f"memory://{tmp_path.name}"), queue.Queue[dict[str, Any]]()
    made = [samples.commit(root, step) for step in range(1, FRESH + 2)]
    write_index(Catalog(root))
    listed = [one for one in Catalog(root).committed() if one.indexed is not None]
    assert [one.step for one in listed] == [1]
    options = TierOptions(world_size=1, archive=str(tmp_path / "archive"))
    tiers = Tiers(options, rank=0, primary=lambda: root, report=said.put)
    try:
        assert {said.get(timeout=60)["reason"] for _ in made} == {None}
    finally:
        tiers.finish(lambda: True)
    archived = Catalog(LocalStore(str(tmp_path / "archive"))).committed()
    assert [one.step for one in archived] == list(range(FRESH + 1, 0, -1))
