"""Boxes of chunks: the right elements, and no block that they do not touch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults import FaultyStore
from torch_ckpt import save_generation
from torch_ckpt.dcp import regions
from torch_ckpt.dcp.regions import Box, read_boxes
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.read import BlockReader
from torch_ckpt.manifest.commit import read_parts
from torch_ckpt.storage.store import open_store


def _opened(root: Path) -> tuple[FaultyStore, BlockReader, dict[str, Any]]:
    store = FaultyStore(open_store(root))
    generation = Catalog(store).find()
    (part,) = read_parts(store, generation.folder, generation.manifest)
    reader = BlockReader(store, generation.folder, part)
    store.calls.clear()
    return store, reader, {entry.name: entry for entry in part.tensors}


@pytest.fixture(scope="module")
def cube(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, BlockReader, Any]:
    root = tmp_path_factory.mktemp("cube")
    whole = torch.arange(5 * 6 * 7, dtype=torch.int16).reshape(5, 6, 7)
    save_generation(root, {"first": torch.ones(3), "w": whole}, step=1)
    _, reader, entries = _opened(root)
    return whole, reader, entries["w"].chunks[0]


@settings(max_examples=60)
@given(
    data=st.data(),
    landing=st.sampled_from([8, 100, 1 << 20]),
    sparse=st.sampled_from([1, 20, 1 << 20]),
    dtype=st.sampled_from([torch.int16, torch.int64]),
    order=st.permutations([0, 1, 2]),
)
def test_any_box_reaches_any_tensor(
    cube: tuple[torch.Tensor, BlockReader, Any],
    data: st.DataObject,
    landing: int,
    sparse: int,
    dtype: torch.dtype,
    order: list[int],
) -> None:
    whole, reader, chunk = cube
    first = [data.draw(st.integers(0, size - 1)) for size in whole.shape]
    sizes = [
        data.draw(st.integers(1, size - start))
        for size, start in zip(whole.shape, first, strict=True)
    ]
    expected = whole
    for dim, (start, size) in enumerate(zip(first, sizes, strict=True)):
        expected = expected.narrow(dim, start, size)
    # Memory in any order of dimensions, so that targets are contiguous and not.
    target = torch.zeros([sizes[dim] for dim in order], dtype=dtype)
    target = target.permute([order.index(dim) for dim in range(3)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "_LANDING_BYTES", landing)
        patch.setattr(regions, "_GROUP_BYTES", 2 * landing)
        patch.setattr(regions, "_SPARSE_BYTES", sparse)
        read_boxes([Box(reader, chunk, whole.dtype, tuple(first), target)])
    assert torch.equal(target, expected.to(dtype))


def test_only_blocks_that_a_box_touches_are_read_and_each_once(tmp_path: Path) -> None:
    rows = torch.arange(12 << 20, dtype=torch.int32).reshape(12, 1 << 20)  # 48 MiB, six blocks
    save_generation(tmp_path, {"rows": rows, "small": torch.ones(9)}, step=1)
    store, reader, entries = _opened(tmp_path)
    chunk = entries["rows"].chunks[0]

    def reads(*boxes: tuple[tuple[int, int], torch.Tensor]) -> int:
        store.calls.clear()
        read_boxes([Box(reader, chunk, rows.dtype, at, target) for at, target in boxes])
        for (row, column), target in boxes:
            height, width = target.shape
            assert torch.equal(target, rows[row : row + height, column : column + width])
        return sum(operation == "read" for operation, _ in store.calls)

    new = lambda *shape: torch.zeros(shape, dtype=torch.int32)  # noqa: E731
    assert reads(((4, 0), new(2, 1 << 20))) == 1, "one block of whole rows"
    assert reads(((4, 5), new(2, 100)), ((4, 500), new(2, 100))) == 1, "two boxes in one block"
    assert reads(((0, 7), new(12, 3))) == 6, "a column crosses every block"
    assert reads(((0, 0), new(1, 10)), ((11, 0), new(1, 10))) == 2, "the first and the last"
