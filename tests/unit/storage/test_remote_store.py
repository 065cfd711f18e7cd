"""What a store behind fsspec promises beyond the suite: nothing half-written is ever published."""

from __future__ import annotations

import gc
import io
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from torch_ckpt.errors import ConfigError, StorageError
from torch_ckpt.storage.remote import FsspecStore
from torch_ckpt.storage.store import Capabilities, Entry, open_store


@pytest.fixture
def prefix() -> Iterator[str]:
    prefix = f"/run-{uuid.uuid4().hex}"
    yield prefix
    fs = fsspec.filesystem("memory")
    for path in fs.find(prefix):
        fs.rm_file(path)


class Upload(AbstractBufferedFile):
    """Publishes on close, as the files of object stores do, also when it is collected."""

    def _initiate_upload(self) -> None:
        self.parts = io.BytesIO()

    def _upload_chunk(self, final: bool = False) -> None:  # anything but False: it was sent
        self.parts.write(self.buffer.getvalue())
        if final:
            MemoryFileSystem.pipe_file(self.fs, self.path, self.parts.getvalue())


class UploadingMemory(MemoryFileSystem):
    def _open(self, path, mode="rb", *args: Any, **kwargs: Any):
        if mode == "wb" and "data" not in kwargs:
            small: Any = 64  # so that one write makes several requests
            return Upload(self, path, mode, block_size=small)
        return super()._open(path, mode, *args, **kwargs)


@pytest.fixture
def store(prefix: str) -> FsspecStore:
    return FsspecStore(UploadingMemory(skip_instance_cache=True), prefix, f"memory:/{prefix}")


def test_a_streamed_object_appears_when_it_is_finished(store: FsspecStore) -> None:
    sink = store.create("g/shard", 400)
    sink.write_at(0, memoryview(b"a" * 300))
    assert store.entries("g") == []
    sink.write_at(300, memoryview(b"b" * 100))
    sink.finish()
    assert store.get("g/shard", limit=400) == b"a" * 300 + b"b" * 100


@pytest.mark.parametrize("given", [0, 10, 300])
def test_an_abandoned_object_is_not_published_even_when_collected(
    store: FsspecStore, given: int
) -> None:
    sink = store.create("g/shard", 400)
    sink.write_at(0, memoryview(b"a" * given))
    with pytest.raises(StorageError, match=f"{given} of 400"):
        sink.finish()
    sink.abandon()
    del sink
    gc.collect()
    assert store.entries("g") == []


def test_a_refusal_of_the_server_is_a_storage_error_that_names_the_url(prefix: str) -> None:
    class Down(MemoryFileSystem):
        def ls(self, path, detail=True, **kwargs):
            raise ConnectionResetError("503 SlowDown")

        def pipe_file(self, path, value, mode="overwrite", **kwargs):
            raise RuntimeError("no bucket")

    store = FsspecStore(Down(skip_instance_cache=True), prefix, f"memory:/{prefix}")
    with pytest.raises(StorageError, match=rf"cannot write memory:/{prefix}/x: no bucket"):
        store.put("x", b"")
    for listing in (store.folders, lambda: store.entries("g"), lambda: store.delete_folder("g")):
        with pytest.raises(StorageError, match="503 SlowDown"):  # never an empty list
            listing()


def test_a_write_by_another_process_is_listed_at_once(prefix: str) -> None:
    first, second = open_store(f"memory:/{prefix}"), open_store(f"memory:/{prefix}")
    assert first.entries("g") == []
    second.put("g/x", b"1")
    assert first.entries("g") == [Entry(name="x", bytes=1)]
    assert first.folders() == ["g"]


def test_it_says_that_it_holds_no_files(prefix: str) -> None:
    store = open_store(f"memory:/{prefix}/")
    assert store.capabilities == Capabilities(files=False, random_access=False)
    assert store.url == f"memory:/{prefix}"


def test_a_wrong_option_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="zip"):
        open_store("zip://x::memory://none", {"fo": 3, "mode": "nonsense"})
