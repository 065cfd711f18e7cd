"""Stores on S3, through obstore and through s3fs: the suite, and what only such stores promise."""

from __future__ import annotations

import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.s3.servers import Server, seaweed, weed_program
from tests.suites.store_suite import StoreSuite, source, write
from tests.unit.storage.environment import set_environment
from torch_ckpt.errors import StorageError
from torch_ckpt.storage.objects import ObjectStore
from torch_ckpt.storage.outgoing import PART_BYTES
from torch_ckpt.storage.remote import FsspecStore, open_fsspec
from torch_ckpt.storage.store import Entry, Store, open_store

FAST = {"retries": {"max_attempts": 1}, "read_timeout": 5, "connect_timeout": 5}
"""So that what must fail does not try for minutes."""


def fresh(server: Server) -> str:
    return f"s3://{server.bucket}/run-{uuid.uuid4().hex}"


class TestObjectStore(StoreSuite):
    atomic = False  # the imitation lets two win once in a while
    reads = 32

    @pytest.fixture
    def store(self, server: Server) -> Store:
        store = open_store(fresh(server), server.storage_options)
        assert isinstance(store, ObjectStore)
        return store


@pytest.mark.slow
class TestS3fsStore(StoreSuite):
    atomic = False
    reads = 32

    @pytest.fixture
    def store(self, server: Server) -> Store:
        return open_fsspec(fresh(server), server.storage_options)


@pytest.fixture(scope="session")
def real() -> Iterator[Server]:
    if weed_program() is None:
        pytest.skip("no SeaweedFS for this platform")
    with seaweed() as server:
        yield server


@pytest.fixture
def real_server(real: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    set_environment(monkeypatch, real)
    return real


@pytest.mark.s3
class TestObjectStoreOnRealServer(StoreSuite):
    @pytest.fixture
    def store(self, real_server: Server) -> Store:
        return open_store(fresh(real_server), real_server.storage_options)

    def test_uploads_are_aborted_by_their_age(self, store: Store, real_server: Server) -> None:
        begin(real_server, f"{below(store, real_server)}/g/shard")
        assert store.abort_uploads("g", older_than_s=60.0) == 0
        time.sleep(1.1)
        assert store.abort_uploads("g", older_than_s=1.0) == 1


@pytest.mark.s3
class TestS3fsStoreOnRealServer(StoreSuite):
    @pytest.fixture
    def store(self, real_server: Server) -> Store:
        return open_fsspec(fresh(real_server), real_server.storage_options)


@pytest.fixture(params=["obstore", pytest.param("s3fs", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, server: Server) -> ObjectStore | FsspecStore:
    make: Any = open_store if request.param == "obstore" else open_fsspec
    return make(fresh(server), {**server.storage_options, "config_kwargs": FAST})


def begin(server: Server, key: str) -> None:
    """An upload of which nobody hears again."""
    client = server.client()
    begun = client.create_multipart_upload(Bucket=server.bucket, Key=key)
    client.upload_part(
        Bucket=server.bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"x"
    )


def below(store: Store, server: Server) -> str:
    return store.url.removeprefix(f"s3://{server.bucket}/")


class TestParts:
    @pytest.mark.parametrize(
        "size", [PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, 2 * PART_BYTES + 8_388_631]
    )
    def test_uploads_of_several_parts_have_exactly_their_bytes(
        self, store: Store, server: Server, size: int
    ) -> None:
        data = random.Random(size).randbytes(size)
        store.upload("g/shard", size, source(data))
        found = bytearray(size + 1)
        assert store.read_into("g/shard", 0, memoryview(found)) == size
        assert found[:size] == data
        assert server.uploads(below(store, server)) == []

    def test_streams_of_odd_pieces_have_exactly_their_bytes(
        self, store: Store, server: Server
    ) -> None:
        size = 2 * PART_BYTES + 12_345_677
        data = random.Random(1).randbytes(size)
        write(store, "g/shard", data, 5_000_011)
        assert store.get("g/shard", limit=size) == data
        assert server.uploads(below(store, server)) == []

    def test_buffers_given_to_a_stream_may_be_used_again_at_once(self, store: Store) -> None:
        size = 3 * PART_BYTES
        sink = store.create("g/shard", size)
        buffer = bytearray(1 << 20)
        for index in range(size >> 20):
            buffer[:] = bytes([index]) * len(buffer)
            sink.write_at(index << 20, memoryview(buffer))
        buffer[:] = bytes(len(buffer))
        sink.finish()
        found = store.get("g/shard", limit=size)
        assert found == b"".join(bytes([index]) * (1 << 20) for index in range(size >> 20))

    @pytest.mark.parametrize("failing_part", [0, 1, 2])
    def test_a_source_that_fails_leaves_no_object_and_no_multipart(
        self, store: Store, server: Server, failing_part: int
    ) -> None:
        size = 2 * PART_BYTES + 5

        def read(offset: int, target: memoryview) -> int:
            if offset // PART_BYTES == failing_part:
                raise KeyError("the slab is gone")
            return len(target)

        with pytest.raises(KeyError, match="the slab is gone"):
            store.upload("g/shard", size, read)
        assert server.keys(below(store, server)) == []
        assert server.uploads(below(store, server)) == []

    @pytest.mark.parametrize("given", [0, 5, PART_BYTES, 2 * PART_BYTES + 1])
    def test_an_abandoned_stream_leaves_no_object_and_no_multipart(
        self, store: Store, server: Server, given: int
    ) -> None:
        sink = store.create("g/shard", 2 * PART_BYTES + 1)
        sink.write_at(0, memoryview(bytes(given)))
        sink.abandon()
        assert server.keys(below(store, server)) == []
        assert server.uploads(below(store, server)) == []

    def test_a_small_stream_that_is_abandoned_when_full_is_not_published(
        self, store: Store
    ) -> None:
        sink = store.create("g/shard", 5)
        sink.write_at(0, memoryview(b"12345"))
        sink.abandon()
        assert store.entries("g") == []

    def test_parts_are_read_side_by_side_and_end_with_the_upload(self, store: Store) -> None:
        if isinstance(store, FsspecStore):
            pytest.skip("one part after another there")
        before = threading.active_count()
        both = threading.Barrier(2, timeout=20)

        def read(offset: int, target: memoryview) -> int:
            if offset < 2 * PART_BYTES:
                both.wait()
            return len(target)

        store.upload("g/shard", 2 * PART_BYTES + 1, read)
        assert threading.active_count() == before


class TestAborting:
    def test_uploads_that_were_cut_are_aborted_under_their_folder_only(
        self, store: Store, server: Server
    ) -> None:
        root = below(store, server)
        others = [f"{root}/g-2/shard", f"{root}-other/g/shard", f"other/{root}/g/shard"]
        for key in (f"{root}/g/a", f"{root}/g/b", f"{root}/g/a", *others):
            begin(server, key)
        assert store.abort_uploads("g", of="b") == 1
        assert store.abort_uploads("g", of=root) == 0, "of the name, not of what is before it"
        assert store.abort_uploads("g") == 2
        assert store.abort_uploads("g") == 0
        assert server.uploads(root) == [f"{root}-other/g/shard", f"{root}/g-2/shard"]
        assert store.abort_uploads("") == 1
        assert server.uploads(root) == [f"{root}-other/g/shard"]


class TestErrors:
    @pytest.fixture
    def nowhere(self, store: Store, server: Server) -> Store:
        """A store of the same kind in a bucket that does not exist."""
        make: Any = open_store if isinstance(store, ObjectStore) else open_fsspec
        return make("s3://no-such-bucket/run", {**server.storage_options, "config_kwargs": FAST})

    def test_a_bucket_that_does_not_exist_is_an_error_and_not_an_empty_one(
        self, nowhere: Store
    ) -> None:
        for use in (
            lambda: nowhere.put("x", b"1"),
            lambda: nowhere.put_new("x", b"1"),
            lambda: nowhere.upload("x", 1, source(b"1")),
            lambda: nowhere.upload("x", PART_BYTES + 1, source(bytes(PART_BYTES + 1))),
        ):
            with pytest.raises(StorageError, match="no-such-bucket"):
                use()

    def test_a_server_that_is_gone_is_named_and_nothing_looks_missing(self) -> None:
        options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}
        for make in (open_store, open_fsspec):
            store: Store = make("s3://bucket/run", {**options, "config_kwargs": FAST})
            uses = (
                store.folders,
                lambda store=store: store.get("x", limit=1),
                lambda store=store: store.read_into("x", 0, memoryview(bytearray(1))),
                lambda store=store: store.entries("g"),
                lambda store=store: store.put("x", b"1"),
                lambda store=store: store.delete("x"),
                lambda store=store: store.delete_many(["x", "y"]),
            )
            for use in uses if make is open_store else uses[:2]:  # s3fs takes seconds for each
                with pytest.raises(StorageError, match="s3://bucket/run"):
                    use()

    @pytest.mark.parametrize(
        "make", [open_store, pytest.param(open_fsspec, marks=pytest.mark.slow)]
    )
    def test_a_server_that_accepts_and_then_stalls_is_given_up(self, make: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as stalled:
            options = {
                "key": "k",
                "secret": "s",
                "endpoint_url": f"http://127.0.0.1:{stalled.getsockname()[1]}",
                "config_kwargs": {"read_timeout": 1, "retries": {"max_attempts": 0}},
            }
            store = make("s3://bucket/run", options)
            began = time.monotonic()
            with pytest.raises(StorageError, match="s3://bucket/run/x"):
                store.put("x", b"1")
            assert time.monotonic() - began < 30

    def test_both_ways_to_a_bucket_read_each_others_names(self, server: Server) -> None:
        url = fresh(server)
        fast = open_store(url, server.storage_options)
        plain = open_fsspec(url, server.storage_options)
        odd = ["g/epoch=3-step=700 é [x]*?#%20.ckpt", "g/a+b&c;d", "g/~x'\"<>|\\^`{}", "g/日本"]
        for name in odd:
            fast.put(name, b"fast")
            assert plain.get(name, limit=9) == b"fast"
            plain.put(name, b"plain")
            assert fast.get(name, limit=9) == b"plain"
        assert fast.entries("g") == plain.entries("g")
        assert len(fast.entries("g")) == len(odd)

    def test_an_object_that_marks_a_folder_is_no_entry(self, store: Store, server: Server) -> None:
        key = f"{below(store, server)}/g/"
        server.client().put_object(Bucket=server.bucket, Key=key, Body=b"")
        store.put("g/x", b"1")
        assert store.entries("g") == [Entry(name="x", bytes=1)]
        assert store.folders() == ["g"]

    @pytest.mark.slow
    def test_more_names_than_one_page_are_listed_and_deleted(self, server: Server) -> None:
        store = open_store(fresh(server), server.storage_options)
        names = [f"g/{index:04}" for index in range(1100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put(name, b""), names))
        assert len(store.entries("g")) == 1100
        store.delete_many(names)
        assert store.entries("g") == []

    def test_a_prefix_may_be_the_bucket_itself(self, server: Server) -> None:
        name = f"top-{uuid.uuid4().hex}"
        for make in (open_store, open_fsspec):
            store: Store = make(f"s3://{server.bucket}", server.storage_options)
            store.put(f"{name}/x", b"1")
            assert name in store.folders()
            assert store.entries(name) == [Entry(name="x", bytes=1)]
            store.delete(f"{name}/x")
            assert name not in store.folders()
