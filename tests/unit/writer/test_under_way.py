"""What is being written in a folder counts for nothing there, and stays what it is.

Files get their size at once under a temporary name, and other ranks may be sending what has the
folder next.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import samples
from tests.faults import FaultyStore
from tests.unit.writer.conftest import rank_of_two
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.storage.store import Entry, Sink
from torch_ckpt.writer.leftovers import sweep_own


def begun(store: FaultyStore | LocalStore, one: Generation, rank: int) -> tuple[Sink, bytes]:
    """A rank's share of which no byte is there yet, and what it will be."""
    name = f"rank-{rank:05d}.{one.manifest.attempt}.safetensors"
    data = Path(one.url, name).read_bytes()
    store.make_folder(one.folder)
    return store.create(f"{one.folder}/{name}", len(data)), data


def test_a_share_that_is_still_being_sent_does_not_count_as_there(
    primary: LocalStore, archive: FaultyStore
) -> None:
    one = samples.commit(primary, 7, ranks=2)
    first, second = (rank_of_two(primary, archive, rank) for rank in (0, 1))
    first.send(one)
    second.send(one)
    assert first.complete(one)
    (shard,) = Path(archive.url, one.folder).glob("rank-00001*.safetensors")
    shard.unlink()  # by somebody; its part stays
    sink, data = begun(archive, one, 1)
    assert not first.complete(one), "the file has its size, under a temporary name"
    sink.write_at(0, memoryview(data))
    sink.finish()
    assert first.complete(one)


@pytest.mark.parametrize("attempt", ["0123a002", "0456b000"], ids=["of-this-run", "of-the-next"])
def test_a_commit_in_the_archive_leaves_what_another_rank_is_sending(
    primary: LocalStore, archive: FaultyStore, attempt: str
) -> None:
    older = samples.commit(primary, 1, ranks=2, folder="last.ckpt", attempt="0123a001")
    first, second = (rank_of_two(primary, archive, rank) for rank in (0, 1))
    first.send(older)
    second.send(older)
    newer = samples.commit(primary, 2, ranks=2, folder="last.ckpt", attempt=attempt)
    sink, data = begun(archive, newer, 1)
    assert first.complete(older)
    first.commit(older)
    first.tidy(older)
    sink.write_at(0, memoryview(data))
    sink.finish()
    second.send(newer)
    first.send(newer)
    assert first.complete(newer)
    first.commit(newer)
    assert verify(archive, newer).ok


class Overtaken(LocalStore):
    """Another process makes a file while a folder is being swept: after its first listing."""

    def __init__(self, root: str, path: Path) -> None:
        super().__init__(root)
        self._path_of_the_other = path

    def entries(self, folder: str) -> list[Entry]:
        found = super().entries(folder)
        self._path_of_the_other.touch()
        return found


def test_a_share_that_is_begun_while_its_folder_is_swept_stays(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt" / "rank-00001.0123a002.safetensors.0a0a0a0a.tmp"
    store = Overtaken(str(tmp_path), path)
    samples.commit(LocalStore(str(tmp_path)), 1, ranks=2, folder="last.ckpt", attempt="0123a001")
    sweep_own(store, "last.ckpt", "0123a001")
    assert path.exists()
