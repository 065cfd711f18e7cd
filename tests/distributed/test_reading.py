"""No rank reads what it does not need, and no byte is read twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import reading_job as job
from tests.distributed.ranks import run_ranks
from torch_ckpt.manifest.entries import BLOCK_BYTES

HEADER_BYTES = 1 << 16
"""Headers of shards are compared too, on every rank."""


def loaded(
    folder: Path, saved: int, how: job.Sharding, world: int, shardings: list[job.Sharding]
) -> list[list[int]]:
    """By sharding, the bytes that each rank reads."""
    root = str(folder / "run")
    assert run_ranks(folder / "saved", job.save, saved, root, how) == [None] * saved
    results = run_ranks(folder / "loaded", job.load, world, root, shardings)
    for result in results:
        assert isinstance(result, list), result
        assert all(one["same"] for one in result)
    return [[result[index]["bytes"] for result in results] for index in range(len(shardings))]


@pytest.mark.parametrize("dim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_to_eight_and_eight_to_one_read_every_byte_once(tmp_path: Path, dim: int) -> None:
    for number, (saved, world) in enumerate(((1, 8), (8, 1))):
        folder = tmp_path / str(number)
        folder.mkdir()
        how: job.Sharding = (dim, 1)
        (each,) = loaded(folder, saved, how, world, [how])
        assert job.BYTES <= sum(each) <= 1.1 * job.BYTES + BLOCK_BYTES, each
        most = 1.1 * job.BYTES / world + BLOCK_BYTES + HEADER_BYTES
        assert max(each) <= most, each


def test_four_replicas_read_one_copy_between_them_in_equal_shares(tmp_path: Path) -> None:
    shardings: list[job.Sharding] = [(None, 4), (0, 4), (1, 2)]
    for each in loaded(tmp_path, 2, (0, 1), 4, shardings):
        assert job.BYTES <= sum(each) <= 1.02 * job.BYTES, each
        assert max(each) <= 1.1 * sum(each) / len(each), each
