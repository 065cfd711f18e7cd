"""Documents of a generation are read from storage once, whatever the number of ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import samples
from tests.distributed import documents_job as job
from tests.distributed.ranks import run_ranks
from torch_ckpt.errors import DisagreementError, FormatError, IntegrityError
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.sharding.broadcast import PeerFailed
from torch_ckpt.storage.local import LocalStore

PARTS = 5


@pytest.fixture
def committed(tmp_path: Path) -> tuple[str, Generation]:
    store = LocalStore(str(tmp_path / "run"))
    return store.url, samples.commit(store, 5, ranks=PARTS)


@pytest.mark.parametrize("world", [2, 7])
def test_each_part_and_header_is_read_by_one_rank_and_known_to_all(
    tmp_path: Path, committed: tuple[str, Generation], world: int
) -> None:
    found = run_ranks(tmp_path / "ranks", job.opened, world, committed[0], {})
    asked: Counter[str] = Counter()
    for one in found:
        assert one["ranks"] == list(range(PARTS)), one
        assert one["digest"] == found[0]["digest"]
        asked.update(one["asked"])
    names = [stored.name for stored in committed[1].manifest.parts]
    assert {name: asked[name] for name in names} == dict.fromkeys(names, 1)
    shards = {name: count for name, count in asked.items() if name.endswith(".safetensors")}
    assert len(shards) == PARTS
    assert len(set(shards.values())) == 1, shards


def outcomes(tmp_path: Path, root: str, faults: dict[int, str]) -> list[Any]:
    return run_ranks(tmp_path / "ranks", job.opened, 3, root, faults, timeout_s=60)


@pytest.mark.parametrize("fault", ["unreadable", "changed"])
def test_a_rank_that_cannot_read_its_share_ends_it_on_all_of_them(
    tmp_path: Path, committed: tuple[str, Generation], fault: str
) -> None:
    found = outcomes(tmp_path, committed[0], {1: fault})
    assert isinstance(found[1], OSError if fault == "unreadable" else IntegrityError), found
    assert isinstance(found[0], PeerFailed), found
    assert isinstance(found[2], PeerFailed), found


def test_a_part_that_arrives_changed_is_no_damage_and_keeps_nobody_waiting(
    tmp_path: Path, committed: tuple[str, Generation]
) -> None:
    found = outcomes(tmp_path, committed[0], {2: "on the way"})
    assert isinstance(found[2], DisagreementError), found
    assert "did not arrive on rank 2" in str(found[2])
    assert found[0]["digest"] == found[1]["digest"]


def test_what_a_peer_cannot_take_to_pieces_is_no_damage(
    tmp_path: Path, committed: tuple[str, Generation]
) -> None:
    found = outcomes(tmp_path, committed[0], {1: "another version"})
    for rank in range(3):
        assert isinstance(found[rank], DisagreementError), found
        assert "of rank 1 cannot be taken to pieces" in str(found[rank])


def test_parts_that_do_not_belong_together_are_refused_on_every_rank(
    tmp_path: Path, committed: tuple[str, Generation]
) -> None:
    found = outcomes(tmp_path, committed[0], dict.fromkeys(range(3), "another size"))
    assert all(isinstance(one, FormatError) for one in found), found
