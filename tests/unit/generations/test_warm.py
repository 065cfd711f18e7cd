"""What comes by on its way from farther away fills the cache, if all of it is what was written."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests import samples
from tests.faults import FaultyStore
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.copy import lacks
from torch_ckpt.generations.read import BlockReader
from torch_ckpt.generations.verify import verify
from torch_ckpt.generations.warm import Warming
from torch_ckpt.manifest.commit import read_parts
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.storage.store import Store


class FlippingHeaders(FaultyStore):
    """Flips a bit of each header on its way, and of nothing else."""

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        count = super().read_into(name, offset, target)
        if offset < 4096 and count > 100:
            target[50] ^= 1
        return count


@pytest.fixture
def cache(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "source"))


def pass_by(source: Store, cache: Store, one: Generation) -> None:
    """Read a generation as a load does."""
    (part,) = read_parts(source, one.folder, one.manifest)
    warm = Warming(source, cache, one, part)
    reader = BlockReader(source, one.folder, part)
    for index, block in enumerate(part.blocks):
        warm.take(part, index, reader.read(index, memoryview(bytearray(block.bytes))))
    warm.finish()
    warm.close()


def test_what_came_by_whole_is_in_the_cache(source: LocalStore, cache: LocalStore) -> None:
    one = samples.commit(source, 3)
    pass_by(source, cache, one)
    assert verify(cache, one).ok


def test_a_header_that_changed_on_its_way_is_not_cached(
    source: LocalStore, cache: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    one = samples.commit(source, 3)
    with caplog.at_level(logging.WARNING):
        pass_by(FlippingHeaders(source), cache, one)
    assert any("is not cached" in line and "header" in line for line in caplog.messages)
    assert lacks(cache, one) == "its manifest is not there"
    assert [entry.name for entry in cache.entries(one.folder)] == []


def test_a_share_that_a_killed_load_left_in_its_full_size_is_written_again(
    source: LocalStore, cache: LocalStore
) -> None:
    one = samples.commit(source, 3)
    (shard,) = Path(source.url, one.folder).glob("*.safetensors")
    cache.make_folder(one.folder)
    Path(cache.url, one.folder, shard.name).write_bytes(bytes(shard.stat().st_size))
    pass_by(source, cache, one)
    assert verify(cache, one).ok
