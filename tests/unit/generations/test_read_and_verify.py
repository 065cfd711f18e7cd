"""No byte comes back unchecked, and verification names everything that is wrong."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests import samples
from tests.faults import FaultyStore
from torch_ckpt.errors import IntegrityError
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.read import BlockReader
from torch_ckpt.generations.verify import Report, verify
from torch_ckpt.manifest.commit import read_parts
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(str(tmp_path))


@pytest.fixture
def committed(store: Store) -> Generation:
    return samples.commit(store, 3, ranks=2)


def reader_of(store: Store, generation: Generation, rank: int = 0) -> BlockReader:
    parts = read_parts(store, generation.folder, generation.manifest)
    return BlockReader(store, generation.folder, parts[rank])


def shard(store: Store, generation: Generation, rank: int = 0) -> Path:
    name = f"rank-{rank:05d}.{generation.manifest.attempt}.safetensors"
    return Path(store.url, generation.folder, name)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def files_named(report: Report) -> set[str]:
    return {damage.file for damage in report.damages}


def test_blocks_give_back_every_tensor(store: Store, committed: Generation) -> None:
    reader = reader_of(store, committed)
    scratch = memoryview(bytearray(1 << 20))
    raw = b"".join(bytes(reader.read(index, scratch)) for index in range(len(reader.part.blocks)))
    expected = {f"0.{name}": value for name, value in samples.arrays(3).items()}
    for tensor in reader.part.tensors:
        (chunk,) = tensor.chunks
        found = raw[chunk.start : chunk.start + tensor.chunk_bytes(chunk)]
        assert found == expected[tensor.name].tobytes()


def test_threads_may_share_a_reader(store: Store, committed: Generation) -> None:
    reader = reader_of(store, committed)
    indices = list(range(len(reader.part.blocks))) * 20
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda i: bytes(reader.read(i, memoryview(bytearray(1 << 16)))), indices)
        )
    assert found[: len(reader.part.blocks)] * 20 == found


def test_blocks_for_and_tensors_in_agree_with_the_layout(
    store: Store, committed: Generation
) -> None:
    reader = reader_of(store, committed)
    for tensor in reader.part.tensors:
        (chunk,) = tensor.chunks
        length = tensor.chunk_bytes(chunk)
        blocks = reader.blocks_for(chunk.start, length)
        holding = [
            index
            for index in range(len(reader.part.blocks))
            if tensor.name in reader.tensors_in(index)
        ]
        assert list(blocks) == holding
        if length:
            assert reader.starts[blocks[0]] <= chunk.start
            assert reader.starts[blocks[-1] + 1] >= chunk.start + length


def test_scratch_that_is_too_small_is_no_damage(store: Store, committed: Generation) -> None:
    with pytest.raises(ValueError, match="scratch has 5 bytes"):
        reader_of(store, committed).read(0, memoryview(bytearray(5)))


def test_a_tensor_may_span_blocks_and_a_block_may_hold_tensors(store: Store) -> None:
    tensors = {
        "large": np.arange(1 << 18, dtype=np.float32),
        **{f"small.{n}": np.full(4, n, dtype=np.float32) for n in range(10)},
    }
    reader = BlockReader(store, "g", samples.image(tensors).part)
    assert reader.blocks_for(0, 1 << 20) == range(256)
    assert reader.blocks_for(4096, 4096) == range(1, 2)
    assert reader.blocks_for(4095, 2) == range(2)
    assert reader.blocks_for(5, 0) == range(0)
    assert reader.tensors_in(255) == ["large"]
    assert reader.tensors_in(256) == [f"small.{n}" for n in range(10)]


def test_damage_in_a_block_names_file_offset_and_tensors(
    store: Store, committed: Generation
) -> None:
    reader = reader_of(store, committed)
    block = reader.part.blocks[1]
    flip(shard(store, committed), block.offset + 7)
    scratch = memoryview(bytearray(1 << 16))
    with pytest.raises(IntegrityError, match="SHA-256") as caught:
        reader.read(1, scratch)
    assert caught.value.file == str(shard(store, committed))
    assert caught.value.offset == block.offset
    assert caught.value.tensors == reader.tensors_in(1) == ["0.model.steps"]
    os.truncate(shard(store, committed), block.offset + 5)
    with pytest.raises(IntegrityError, match="too early"):
        reader.read(1, scratch)


def test_a_sound_generation_verifies_and_reports_every_byte(
    store: Store, committed: Generation
) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(store, committed, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    documents = sum(part.bytes for part in committed.manifest.parts)
    assert report.bytes_checked == committed.manifest.bytes + documents
    assert seen[-1] == (report.bytes_checked, report.bytes_checked)
    assert seen == sorted(seen)


def test_every_flipped_byte_region_is_found(store: Store, committed: Generation) -> None:
    for path in sorted(Path(store.url, committed.folder).iterdir()):
        size = path.stat().st_size
        for offset in {0, 9, size // 2, size - 1}:
            flip(path, offset)
            report = verify(store, committed)
            assert path.name in files_named(report), (path, offset)
            assert len(report.damages) <= 2
            flip(path, offset)
    assert verify(store, committed).ok


def test_all_damage_is_listed_with_its_tensors(store: Store, committed: Generation) -> None:
    blocks = reader_of(store, committed).part.blocks
    flip(shard(store, committed, 0), blocks[0].offset)
    flip(shard(store, committed, 0), blocks[-1].offset)
    os.truncate(shard(store, committed, 1), blocks[0].offset + 1)
    report = verify(store, committed)
    assert [damage.offset for damage in report.damages] == [
        blocks[0].offset,
        blocks[-1].offset,
        blocks[0].offset + 1,
    ]
    assert report.damages[0].tensors == ("0.optimizer.exp_avg",)
    assert "1.model.mask" in report.damages[2].tensors
    assert report.bytes_checked < committed.manifest.bytes


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_and_swapped_files_are_named(
    store: Store, committed: Generation, rank: int
) -> None:
    path = shard(store, committed, rank)
    data = path.read_bytes()
    path.unlink()
    (damage,) = verify(store, committed).damages
    assert damage.file == path.name
    assert "missing" in damage.reason
    assert len(damage.tensors) == 4  # the empty one has no bytes to lose
    path.symlink_to("/etc/hostname")
    (damage,) = verify(store, committed).damages
    assert damage.file == path.name
    path.unlink()
    path.write_bytes(shard(store, committed, 1 - rank).read_bytes())
    assert files_named(verify(store, committed)) == {path.name}
    path.write_bytes(data + b"tail")
    (damage,) = verify(store, committed).damages
    assert "bytes, the part says" in damage.reason


def test_lost_documents_are_named(store: Store, committed: Generation) -> None:
    part = committed.manifest.parts[1].name
    store.delete(f"{committed.folder}/{part}")
    (damage,) = verify(store, committed).damages
    assert (damage.file, damage.reason) == (part, "it is missing")
    store.delete(f"{committed.folder}/manifest.json")
    assert files_named(verify(store, committed)) == {part, "manifest.json"}


def test_a_header_that_lies_is_found(store: Store, committed: Generation) -> None:
    path = shard(store, committed)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"0.model.mask"', b'"0.model.mosk"'))
    (damage,) = verify(store, committed).damages
    assert "header" in damage.reason
    path.write_bytes((1 << 60).to_bytes(8, "little") + data[8:])
    (damage,) = verify(store, committed).damages
    assert "header" in damage.reason
    assert verify(store, committed, threads=1).damages == (damage,)


def test_a_block_that_storage_cannot_read_is_damage(store: Store, committed: Generation) -> None:
    faulty = FaultyStore(store)
    faulty.fail("read", nth=4)
    report = verify(faulty, committed)
    assert len(report.damages) == 1
    assert "injected" in report.damages[0].reason
