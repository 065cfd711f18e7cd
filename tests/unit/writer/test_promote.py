"""What a promotion makes of a file that is missing: it matters in which tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import samples
from tests.faults import FaultyStore
from torch_ckpt.errors import StorageError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.writer.promote import Promoter, PromotionRefused
from torch_ckpt.writer.setbacks import Setbacks


@pytest.fixture
def primary(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "primary"))


@pytest.fixture
def archive(tmp_path: Path) -> FaultyStore:
    return FaultyStore(LocalStore(str(tmp_path / "archive")))


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
