"""Two tiers, of which the second one may fail, and who promotes from one to the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import FaultyStore
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.writer.promote import Promoter


@pytest.fixture
def primary(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "primary"))


@pytest.fixture
def archive(tmp_path: Path) -> FaultyStore:
    return FaultyStore(LocalStore(str(tmp_path / "archive")))


def rank_of_two(primary: LocalStore, archive: FaultyStore, rank: int) -> Promoter:
    return Promoter(primary, archive, rank=rank, world_size=2, pace=lambda count: None)
