"""What every store promises, as tests to inherit: give the class a `store` fixture.

Knows the Store protocol. Knows nothing of one kind of store.
"""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from torch_ckpt.errors import StorageError
from torch_ckpt.storage.store import Entry, Read, Store, open_store

PAGE = 4096


def pattern(size: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(min(size, 4093))) * (size // 4093 + 1)


def write(store: Store, name: str, data: bytes, block: int = 2 * PAGE) -> None:
    sink = store.create(name, len(data))
    for start in range(0, len(data), block):
        sink.write_at(start, memoryview(data)[start : start + block])
    sink.finish()


def source(data: bytes) -> Read:
    """A source of `data`, which ends where that does."""

    def read(offset: int, target: memoryview) -> int:
        found = data[offset : offset + len(target)]
        target[: len(found)] = found
        return len(found)

    return read


class StoreSuite:
    atomic = True
    """Whether `put_new` decides between those who ask at the same moment."""
    reads = 512
    """How many reads many threads share; fewer where each is a request."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def folder(self, store: Store) -> None:
        store.make_folder("g")

    def test_a_document_comes_back_whole(self, store: Store) -> None:
        store.put("g/manifest.json", b"{}")
        assert store.get("g/manifest.json", limit=2) == b"{}"

    def test_a_document_replaces_what_was_there(self, store: Store) -> None:
        store.put("LATEST", b"a much longer document than the next")
        store.put("LATEST", b"short")
        assert store.get("LATEST", limit=100) == b"short"

    def test_an_empty_document_is_a_document(self, store: Store) -> None:
        store.put("g/empty", b"")
        assert store.get("g/empty", limit=10) == b""
        assert store.entries("g") == [Entry(name="empty", bytes=0)]

    def test_a_document_over_its_limit_is_refused_by_name(self, store: Store) -> None:
        store.put("g/manifest.json", b"123456")
        with pytest.raises(StorageError, match=r"g/manifest\.json.* 5 "):
            store.get("g/manifest.json", limit=5)

    @pytest.mark.parametrize("name", ["g/none", "none", "none/at/all"])
    def test_a_missing_name_is_file_not_found(self, store: Store, name: str) -> None:
        with pytest.raises(FileNotFoundError, match="none"):
            store.get(name, limit=5)
        with pytest.raises(FileNotFoundError, match="none"):
            store.read_into(name, 0, memoryview(bytearray(4)))
        with pytest.raises(FileNotFoundError, match="none"):
            store.link(name, "g/second")

    @pytest.mark.parametrize(
        "name", ["", "/etc/passwd", "../up", "g/../../up", "g//x", "./g", "g/.", "g/", "a\0b"]
    )
    def test_names_that_could_leave_the_root_are_refused(self, store: Store, name: str) -> None:
        buffer = memoryview(bytearray(4))
        for use in (
            lambda: store.put(name, b"x"),
            lambda: store.put_new(name, b"x"),
            lambda: store.upload(name, 1, source(b"x")),
            lambda: store.delete_many([name]),
            lambda: store.get(name, limit=9),
            lambda: store.read_into(name, 0, buffer),
            lambda: store.create(name, 4),
            lambda: store.link("g/a", name),
            lambda: store.link(name, "g/a"),
            lambda: store.delete(name),
            lambda: store.delete_folder(name),
        ):
            with pytest.raises((StorageError, FileNotFoundError)) as caught:
                use()
            assert isinstance(caught.value, StorageError) or "g/a" in str(caught.value)
        if name:
            with pytest.raises(StorageError, match="not a name inside"):
                store.make_folder(name)
            with pytest.raises(StorageError, match="not a name inside"):
                store.entries(name)
            with pytest.raises(StorageError, match="not a name inside"):
                store.abort_uploads(name)

    @pytest.mark.parametrize("size", [0, 1, 511, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 100_001])
    def test_a_written_file_has_exactly_its_bytes(self, store: Store, size: int) -> None:
        data = pattern(size)[:size]
        write(store, "g/shard", data)
        assert store.get("g/shard", limit=size) == data
        assert store.entries("g") == [Entry(name="shard", bytes=size)]

    def test_a_file_given_too_few_bytes_is_not_finished(self, store: Store) -> None:
        sink = store.create("g/shard", 10)
        sink.write_at(0, memoryview(b"12345"))
        with pytest.raises(StorageError, match="5 of 10"):
            sink.finish()
        sink.abandon()
        assert store.entries("g") == []

    @pytest.mark.parametrize("size", [1, PAGE, 3 * PAGE + 5])
    def test_a_file_of_unknown_size_ends_with_its_last_write(self, store: Store, size: int) -> None:
        data = pattern(size)[:size]
        sink = store.create("g/shard", 100 * PAGE, exact=False)
        for start in range(0, size, PAGE):
            sink.write_at(start, memoryview(data[start : start + PAGE]))
        sink.finish()
        assert store.get("g/shard", limit=size) == data
        assert store.entries("g") == [Entry(name="shard", bytes=size)]

    def test_bytes_outside_the_file_are_refused(self, store: Store) -> None:
        sink = store.create("g/shard", 4)
        with pytest.raises(StorageError, match="shard"):
            sink.write_at(0, memoryview(b"12345"))
        sink.abandon()

    def test_abandoning_leaves_nothing_and_may_be_repeated(self, store: Store) -> None:
        sink = store.create("g/shard", 3 * PAGE)
        sink.write_at(0, memoryview(bytes(PAGE)))
        sink.abandon()
        sink.abandon()
        del sink
        assert store.entries("g") == []

    def test_abandoning_a_finished_file_keeps_it(self, store: Store) -> None:
        sink = store.create("g/shard", 4)
        sink.write_at(0, memoryview(b"1234"))
        sink.finish()
        sink.abandon()
        assert store.get("g/shard", limit=4) == b"1234"
        with pytest.raises(StorageError):
            sink.write_at(0, memoryview(b"1234"))

    def test_reads_stop_at_the_end_of_the_file(self, store: Store) -> None:
        store.put("g/x", b"0123456789")
        buffer = bytearray(8)
        assert store.read_into("g/x", 1, memoryview(buffer)) == 8
        assert bytes(buffer) == b"12345678"
        assert store.read_into("g/x", 7, memoryview(buffer)) == 3
        assert bytes(buffer[:3]) == b"789"
        assert store.read_into("g/x", 10, memoryview(buffer)) == 0
        assert store.read_into("g/x", 99, memoryview(buffer)) == 0
        assert store.read_into("g/x", 0, memoryview(bytearray())) == 0

    def test_reads_see_a_replaced_file(self, store: Store) -> None:
        buffer = bytearray(3)
        for data in (b"old", b"new"):
            store.put("g/x", data)
            store.read_into("g/x", 0, memoryview(buffer))
            assert bytes(buffer) == data

    def test_threads_read_one_file_at_once(self, store: Store) -> None:
        data = os.urandom(64 * PAGE)
        write(store, "g/shard", data, 16 * PAGE)

        def read(index: int) -> bool:
            start = index % 64 * PAGE
            buffer = bytearray(PAGE)
            count = store.read_into("g/shard", start, memoryview(buffer))
            return count == PAGE and bytes(buffer) == data[start : start + PAGE]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(self.reads)))

    def test_a_link_has_the_same_bytes_and_outlives_its_source(self, store: Store) -> None:
        store.make_folder("h")
        write(store, "g/shard", pattern(PAGE + 5)[: PAGE + 5])
        store.link("g/shard", "h/shard")
        store.delete("g/shard")
        assert store.get("h/shard", limit=PAGE + 5) == pattern(PAGE + 5)[: PAGE + 5]

    def test_a_new_document_is_published_only_where_nothing_is(self, store: Store) -> None:
        assert store.put_new("g/RUN.json", b"mine")
        assert not store.put_new("g/RUN.json", b"thei")
        assert not store.put_new("g/RUN.json", b"theirs")
        assert not store.put_new("g/RUN.json", b"")
        assert store.get("g/RUN.json", limit=10) == b"mine"
        assert [entry.name for entry in store.entries("g")] == ["RUN.json"]

    def test_a_new_document_that_is_there_already_counts_as_ours(self, store: Store) -> None:
        assert store.put_new("g/RUN.json", b"mine")
        assert store.put_new("g/RUN.json", b"mine")

    def test_an_empty_document_can_be_new(self, store: Store) -> None:
        assert store.put_new("g/empty", b"")
        assert not store.put_new("g/empty", b"x")

    def test_of_those_who_ask_at_once_one_gets_the_name(self, store: Store) -> None:
        if not self.atomic:
            pytest.skip("this store cannot decide between those who ask at the same moment")
        for round_ in range(5):
            start = threading.Barrier(8)

            def ask(mine: int, name: str = f"g/{round_}", start: threading.Barrier = start) -> bool:
                start.wait()
                return store.put_new(name, b"%d" % mine)

            with ThreadPoolExecutor(8) as pool:
                winners = [mine for mine, won in enumerate(pool.map(ask, range(8))) if won]
            assert [b"%d" % mine for mine in winners] == [store.get(f"g/{round_}", limit=9)]

    @pytest.mark.parametrize("size", [0, 1, PAGE + 1, (17 << 20) + 13])
    def test_an_upload_has_exactly_its_bytes(self, store: Store, size: int) -> None:
        data = pattern(size)[:size]
        store.upload("g/shard", size, source(data))
        assert store.entries("g") == [Entry(name="shard", bytes=size)]
        assert store.get("g/shard", limit=size) == data

    def test_an_upload_replaces_what_was_there(self, store: Store) -> None:
        store.put("g/shard", b"before, and longer")
        store.upload("g/shard", 5, source(b"after"))
        assert store.get("g/shard", limit=5) == b"after"

    @pytest.mark.parametrize("size", [10, (17 << 20) + 13])
    def test_an_upload_whose_source_fails_leaves_nothing(self, store: Store, size: int) -> None:
        data = bytes(size)

        def failing(offset: int, target: memoryview) -> int:
            if offset + len(target) == size:
                raise ZeroDivisionError("the source failed")
            return source(data)(offset, target)

        with pytest.raises(ZeroDivisionError, match="the source failed"):
            store.upload("g/shard", size, failing)
        with pytest.raises(StorageError, match=r"g/shard ends at byte \d+, which is 7 bytes"):
            store.upload("g/shard", size, source(data[: size - 7]))
        with pytest.raises(FileNotFoundError, match="gone"):
            store.upload(
                "g/shard", size, lambda *_: (_ for _ in ()).throw(FileNotFoundError("gone"))
            )
        assert store.entries("g") == []
        assert store.abort_uploads("g") == 0

    @pytest.mark.parametrize("size", [3, (17 << 20) + 13])
    def test_bytes_of_another_digest_are_never_published(self, store: Store, size: int) -> None:
        data = pattern(size)[:size]
        with pytest.raises(StorageError, match=r"g/shard has sha256 .* not 000"):
            store.upload("g/shard", size, source(data), sha256="0" * 64)
        assert store.entries("g") == []
        store.upload("g/shard", size, source(data), sha256=hashlib.sha256(data).hexdigest())
        assert store.get("g/shard", limit=size) == data

    def test_uploads_run_side_by_side(self, store: Store) -> None:
        data = pattern(100_000)

        def upload(index: int) -> None:
            store.upload(f"g/{index}", 90_000 + index, source(data))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(upload, range(8)))
        assert sorted(e.bytes for e in store.entries("g")) == [90_000 + i for i in range(8)]

    def test_where_no_upload_was_cut_there_is_none_to_abort(self, store: Store) -> None:
        store.put("g/x", b"1")
        assert store.abort_uploads("g") == store.abort_uploads("") == 0
        assert store.abort_uploads("none", older_than_s=60.0) == 0
        assert store.get("g/x", limit=1) == b"1"

    def test_many_names_are_deleted_and_no_other(self, store: Store) -> None:
        names = ["g/a", "g/b*", "g/[c]", "g/d e%20é"]
        for name in (*names, "g/b-stays", "g/c"):
            store.put(name, b"1")
        store.delete_many([*names, "g/never-was", "none/x"])
        assert [entry.name for entry in store.entries("g")] == ["b-stays", "c"]
        store.delete_many(name for name in ("g/c",))
        store.delete_many([])
        assert [entry.name for entry in store.entries("g")] == ["b-stays"]
        with pytest.raises(StorageError, match="not a name inside"):
            store.delete_many(["g/b-stays", "../up"])

    def test_delete_is_idempotent(self, store: Store) -> None:
        store.put("g/x", b"1")
        store.delete("g/x")
        store.delete("g/x")
        store.delete("none/x")
        assert store.entries("g") == []

    def test_a_folder_goes_only_when_it_is_empty(self, store: Store) -> None:
        store.put("g/x", b"1")
        assert not store.delete_folder("g")
        assert store.get("g/x", limit=1) == b"1"
        store.delete("g/x")
        assert store.delete_folder("g")
        assert store.folders() == []
        assert store.delete_folder("g")

    def test_folders_and_entries_are_sorted_and_direct(self, store: Store) -> None:
        assert store.entries("none") == []
        for name in ("b/z", "b/a", "a/x", "top", "b/deep/x"):
            if "/" in name:
                store.make_folder(name.rpartition("/")[0])
            store.put(name, name.encode())
        assert [name for name in store.folders() if name != "g"] == ["a", "b"]
        assert store.entries("b") == [Entry(name="a", bytes=3), Entry(name="z", bytes=3)]
        assert store.entries("") == [Entry(name="top", bytes=3)]

    def test_names_may_hold_what_frameworks_put_there(self, store: Store) -> None:
        folder = "epoch=3-step=700 é [x]*?#%20.ckpt"
        store.make_folder(folder)
        store.put(f"{folder}/manifest.json", b"{}")
        assert folder in store.folders()
        assert store.get(f"{folder}/manifest.json", limit=2) == b"{}"
        assert store.entries(folder) == [Entry(name="manifest.json", bytes=2)]

    def test_making_a_folder_twice_is_fine(self, store: Store) -> None:
        store.make_folder("g")
        store.make_folder("g")

    def test_its_url_opens_the_same_store(self, store: Store) -> None:
        store.put("g/x", b"1")
        assert open_store(store.url).get("g/x", limit=1) == b"1"

    def test_random_access_means_any_order_and_any_thread(self, store: Store) -> None:
        size = 40 * PAGE + 17
        data = os.urandom(size)
        sink = store.create("g/shard", size)
        if not store.capabilities.random_access:
            with pytest.raises(StorageError, match="in order"):
                sink.write_at(PAGE, memoryview(data)[PAGE : 2 * PAGE])
            sink.abandon()
            return
        starts = list(range(0, size, 4 * PAGE))[::-1]

        def work(mine: list[int]) -> None:
            for start in mine:
                sink.write_at(start, memoryview(data)[start : start + 4 * PAGE])

        threads = [threading.Thread(target=work, args=(starts[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sink.finish()
        assert store.get("g/shard", limit=size) == data
