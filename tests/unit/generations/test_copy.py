"""A copy is the same generation or none: every byte is checked as it passes, the manifest last."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests import samples
from tests.faults import FaultyStore
from torch_ckpt.errors import FormatError, GenerationNotFound, IntegrityError, StorageError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.copy import (
    complete_copy,
    copy_generation,
    copy_part,
    lacks,
)
from torch_ckpt.generations.passage import Passage
from torch_ckpt.generations.verify import verify
from torch_ckpt.manifest.commit import publish_manifest, read_parts
from torch_ckpt.manifest.schema import Part
from torch_ckpt.storage.local import LocalStore


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "primary"))


@pytest.fixture
def target(tmp_path: Path) -> FaultyStore:
    return FaultyStore(LocalStore(str(tmp_path / "archive")))


def contents(store: LocalStore | FaultyStore, folder: str) -> dict[str, bytes]:
    there = Path(store.url, folder)
    return {path.name: path.read_bytes() for path in there.iterdir()} if there.exists() else {}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_copy_has_the_same_bytes_and_the_order_of_a_commit(
    source: LocalStore, target: FaultyStore
) -> None:
    one = samples.commit(source, 7, ranks=3, tags={"permanent": "x"}, folder="epoch=1.ckpt")
    seen: list[int] = []
    copied = copy_generation(source, target, one, progress=seen.append)
    assert contents(target, one.folder) == contents(source, one.folder)
    assert (copied.files, copied.bytes) == (6, one.stored_bytes)
    assert sum(seen) == one.stored_bytes
    order = [name.split(".", 1)[1] for call, name in target.calls if call in {"put", "upload"}]
    assert order[-1].endswith("manifest.json")
    assert verify(target, Catalog(target).find(step=7)).ok
    assert lacks(target, one) is None


def test_what_is_there_is_not_sent_again_wherever_the_copy_was_cut(
    source: LocalStore, target: FaultyStore
) -> None:
    one = samples.commit(source, 7, ranks=2)
    sent = 0
    for operation, nth in (("upload", 2), ("put", 2), ("entries", 1), ("put", 1)):
        target.fail(operation, nth=nth)
        before = len(target.calls)
        with pytest.raises(StorageError, match="injected"):
            copy_generation(source, target, one)
        assert Catalog(target).committed() == []
        assert lacks(target, one) == "its manifest is not there"
        sent += sum(call == "upload" for call, _ in target.calls[before:])
    target.release()
    copy_generation(source, target, one)
    uploads = [name for call, name in target.calls if call == "upload"]
    assert len(set(uploads)) == 2
    assert len(uploads) == 3  # the one that failed
    assert lacks(target, one) is None
    assert copy_generation(source, target, one).files == 0


@pytest.mark.parametrize("way", [copy_generation, complete_copy])
def test_a_part_of_the_right_size_with_other_bytes_is_written_over(
    source: LocalStore, target: FaultyStore, way: Callable[..., object]
) -> None:
    one = samples.commit(source, 7, ranks=2)
    copy_generation(source, target, one)
    folder = Path(target.url, one.folder)
    flip(folder / one.manifest.parts[1].name, 10)
    assert "SHA-256" in str(lacks(target, one))
    (folder / "manifest.json").unlink()
    way(source, target, one)
    assert contents(target, one.folder) == contents(source, one.folder)
    assert lacks(target, one) is None


def test_parts_may_travel_side_by_side(source: LocalStore, target: FaultyStore) -> None:
    one = samples.commit(source, 7, ranks=8)
    copy_generation(source, target, one, parts_at_once=4)
    assert contents(target, one.folder) == contents(source, one.folder)
    target.fail("upload", nth=3)
    two = samples.commit(source, 8, ranks=8)
    with pytest.raises(StorageError, match="injected"):
        copy_generation(source, target, two, parts_at_once=4)
    assert [found.step for found in Catalog(target).committed()] == [7]


def test_a_cache_holds_the_shards_that_it_was_asked_for(
    source: LocalStore, target: FaultyStore
) -> None:
    one = samples.commit(source, 7, ranks=3)
    mine = [part.files[0].name for part in read_parts(source, one.folder, one.manifest)[:2]]
    copy_generation(source, target, one, files=mine[:1])
    names = set(contents(target, one.folder))
    assert {name for name in names if name.endswith(".safetensors")} == set(mine[:1])
    assert sum(name.endswith(".json") for name in names) == 4
    assert lacks(target, one, mine[:1]) is None
    assert "is not there" in str(lacks(target, one, mine))
    assert copy_generation(source, target, one, files=mine).files == 1
    assert lacks(target, one) is not None


def test_damage_stops_a_copy_before_it_is_one(source: LocalStore, target: FaultyStore) -> None:
    one = samples.commit(source, 7)
    folder = Path(source.url, one.folder)
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        offsets = {0, 9, 300, len(good) // 2, len(good) - 1}
        for offset in sorted(offset for offset in offsets if offset < len(good)):
            flip(path, offset)
            with pytest.raises((IntegrityError, FormatError)) as caught:
                copy_generation(source, target, Catalog(source).find(folder=one.folder))
            assert path.name in str(caught.value)
            assert Catalog(target).committed() == []
            assert not [name for name in contents(target, one.folder) if "safetensors" in name]
            path.write_bytes(good)
    copy_generation(source, target, one)
    assert verify(target, one).ok


def test_a_short_file_is_damage_with_its_offset(source: LocalStore, target: FaultyStore) -> None:
    one = samples.commit(source, 7)
    (shard,) = Path(source.url, one.folder).glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(IntegrityError, match="ends 5 bytes too early") as caught:
        copy_generation(source, target, one)
    assert caught.value.offset == shard.stat().st_size
    shard.unlink()
    with pytest.raises(FileNotFoundError):
        copy_generation(source, target, one)


class Flipping(FaultyStore):
    """Flips a bit of a read on its way, once."""

    left = 1

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        count = super().read_into(name, offset, target)
        if self.left and count > 8192:
            self.left -= 1
            target[5000] ^= 4
        return count


def test_a_bit_that_flipped_on_the_way_is_read_again(
    source: LocalStore, target: FaultyStore
) -> None:
    one = samples.commit(source, 7)
    copy_generation(Flipping(source), target, one)
    assert verify(target, one).ok


def test_what_arrived_damaged_is_not_there_and_no_damage_of_the_source(
    source: LocalStore, target: FaultyStore
) -> None:
    one = samples.commit(source, 7)
    bad = Flipping(target)
    bad.left = 100
    with pytest.raises(StorageError, match="did not arrive"):
        copy_generation(source, bad, one)
    assert not [name for name in contents(target, one.folder) if "safetensors" in name]
    copy_generation(source, target, one)
    assert verify(target, one).ok


def test_an_earlier_generation_in_the_folder_is_replaced(
    source: LocalStore, target: FaultyStore
) -> None:
    samples.commit(target, 5, folder="last.ckpt", attempt="aaaaaaaa")
    Path(target.url, "last.ckpt", "notes.txt").write_text("mine")
    one = samples.commit(source, 6, folder="last.ckpt", attempt="bbbbbbbb")
    assert "holds step 5, attempt aaaaaaaa" in str(lacks(target, one))
    copy_generation(source, target, one)
    assert contents(target, "last.ckpt").keys() == {
        *contents(source, "last.ckpt").keys(),
        "notes.txt",
    }
    assert Catalog(target).find(folder="last.ckpt").step == 6


def test_what_is_incomplete_is_said(source: LocalStore, target: FaultyStore) -> None:
    one = samples.commit(source, 7, ranks=2)
    copy_generation(source, target, one)
    for path in sorted(Path(target.url, one.folder).iterdir()):
        good = path.read_bytes()
        path.unlink()
        assert "is not there" in str(lacks(target, one)), path
        path.write_bytes(good[:-1])
        assert lacks(target, one) is not None, path
        path.write_bytes(good)
    assert lacks(target, one) is None
    target.fail("entries", error=StorageError("503"))
    with pytest.raises(StorageError, match="503"):
        lacks(target, one)


def test_a_part_is_copied_on_its_own_for_each_rank(source: LocalStore, target: FaultyStore) -> None:
    one = samples.commit(source, 7, ranks=2)
    for stored in one.manifest.parts:
        assert copy_part(source, target, one.folder, stored).files == 2
        assert copy_part(source, target, one.folder, stored).files == 0
    assert Catalog(target).committed() == []
    publish_manifest(target, one.folder, one.manifest)
    assert lacks(target, one) is None


def test_a_generation_that_has_gone_is_none(source: LocalStore, target: FaultyStore) -> None:
    one = samples.commit(source, 7)
    Catalog(source).delete(one)
    with pytest.raises(FileNotFoundError):
        copy_generation(source, target, one)
    assert not issubclass(GenerationNotFound, StorageError)


# Passages in pieces


def large(source: LocalStore) -> tuple[Generation, Part, bytes]:
    tensors = {
        **samples.arrays(1),
        "large": np.arange(200_000, dtype=np.float64),
    }
    made = samples.image(tensors)
    name = f"g/{made.part.files[0].name}"
    source.make_folder("g")
    Path(source.url, name).write_bytes(made.shard)
    return samples.generation(1, "g"), made.part, made.shard


def cuts(rng: random.Random, size: int, longest: int) -> list[tuple[int, int]]:
    found, at = [], 0
    while at < size:
        length = min(size - at, rng.randint(1, longest))
        found.append((at, length))
        at += length
    return found


@pytest.mark.parametrize("longest", [3000, 20_000, 300_000, 5_000_000])
def test_pieces_in_any_order_give_the_file(source: LocalStore, longest: int) -> None:
    _, part, shard = large(source)
    rng = random.Random(longest)
    for threads in (1, 4):
        passage = Passage(source, "g", part, 0)
        pieces = cuts(rng, len(shard), longest)
        rng.shuffle(pieces)
        pieces += rng.sample(pieces, len(pieces) // 3)  # asked for again
        out = bytearray(len(shard))

        def take(piece: tuple[int, int], passage: Passage = passage, out: bytearray = out) -> None:
            offset, length = piece
            assert passage.read(offset, memoryview(out)[offset : offset + length]) == length

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(take, pieces))
        assert out == shard


@pytest.mark.parametrize("longest", [3000, 20_000, 300_000])
def test_a_flipped_bit_is_found_whatever_the_pieces(source: LocalStore, longest: int) -> None:
    _, part, shard = large(source)
    (path,) = Path(source.url, "g").iterdir()
    rng = random.Random(longest)
    for _ in range(20):
        passage = Passage(source, "g", part, 0)  # reads the header while it is sound
        damaged = bytearray(shard)
        damaged[rng.randrange(len(shard))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        pieces = cuts(rng, len(shard), longest)
        rng.shuffle(pieces)
        with pytest.raises(IntegrityError):
            for offset, length in pieces:
                passage.read(offset, memoryview(bytearray(length)))
        path.write_bytes(shard)


def test_pieces_that_overlap_others_are_checked_too(source: LocalStore) -> None:
    _, part, shard = large(source)
    (path,) = Path(source.url, "g").iterdir()
    rng = random.Random(3)
    for flipped in (False, True):
        passage = Passage(source, "g", part, 0)
        first = cuts(rng, len(shard), 3000)
        rng.shuffle(first)
        for offset, length in first[: len(first) // 2]:
            passage.read(offset, memoryview(bytearray(length)))
        if flipped:  # in a piece that has passed, and will not be read in the same way again
            offset, length = first[0]
            damaged = bytearray(shard)
            damaged[offset + length // 2] ^= 1
            path.write_bytes(damaged)
        out = bytearray(len(shard))

        def again(passage: Passage = passage, out: bytearray = out) -> None:
            for offset, length in cuts(random.Random(4), len(shard), 5000):
                passage.read(offset, memoryview(out)[offset : offset + length])

        if flipped:
            with pytest.raises(IntegrityError):
                again()
        else:
            again()
            assert out == shard
