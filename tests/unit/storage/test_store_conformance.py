"""Every store passes the same suite."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.faults import FaultyStore
from tests.suites.store_suite import StoreSuite
from torch_ckpt.storage.remote import FsspecStore
from torch_ckpt.storage.store import Store, open_store


class TestLocalStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(os.fspath(tmp_path / "not" / "yet"))


class TestLocalStoreThroughLink(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        return open_store(f"file://{tmp_path}/link")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs at /dev/shm")
class TestLocalStoreInMemory(StoreSuite):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        folder = tempfile.mkdtemp(prefix="torch-ckpt-test-", dir="/dev/shm")
        yield open_store(folder)
        shutil.rmtree(folder)


class TestFaultyStore(StoreSuite):
    """The wrapper for tests is a store as long as no fault is ordered."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FaultyStore(open_store(os.fspath(tmp_path)))


def forget(prefix: str) -> None:
    fs = fsspec.filesystem("memory")
    for path in fs.find(prefix):
        fs.rm_file(path)


class TestMemoryStore(StoreSuite):
    atomic = False

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        prefix = f"/run-{uuid.uuid4().hex}"
        yield open_store(f"memory:/{prefix}")
        forget(prefix)


class StrictMemory(MemoryFileSystem):
    """As strict as object stores are where plain memory is lenient."""

    def cat_file(self, path: str, start=None, end=None, **kwargs):
        if start is not None and start >= self.info(path)["size"]:
            raise OSError(22, "InvalidRange: the requested range is not satisfiable")
        if start == end:
            start = end = None  # an empty range is no range in HTTP
        return super().cat_file(path, start, end, **kwargs)

    def pipe_file(self, path: str, value, mode="overwrite", **kwargs):
        if not isinstance(value, bytes | bytearray):
            raise TypeError("s3fs takes bytes")
        return super().pipe_file(path, value, mode, **kwargs)

    def ls(self, path, detail=True, **kwargs):
        marker = {"name": f"{path}/", "size": 0, "type": "file"}
        return [marker, *super().ls(path, detail, **kwargs)]


class TestStrictStore(StoreSuite):
    atomic = False

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        prefix = f"/run-{uuid.uuid4().hex}"
        yield FsspecStore(StrictMemory(skip_instance_cache=True), prefix, f"memory:/{prefix}")
        forget(prefix)
