"""What a folder of this host promises beyond the suite: durability, links, limits, full disks."""

from __future__ import annotations

import errno
import os
import pickle
import re
import resource
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.suites.store_suite import write
from torch_ckpt.errors import ConfigError, StorageError
from torch_ckpt.storage import durable
from torch_ckpt.storage.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(os.fspath(tmp_path / "run"))
    store.make_folder("g")
    return store


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", os.fspath(folder)]
    if (mounted := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", os.fspath(folder)], check=True)


class TestFullDisk:
    def test_a_full_disk_fails_the_file_by_name_and_leaves_nothing(self, tiny: Path) -> None:
        store = open_store(os.fspath(tiny))
        store.make_folder("g")
        data = bytes(2 << 20)
        sink = store.create("g/shard", len(data))
        with pytest.raises(StorageError, match=r"tiny/g/shard.*; free space") as caught:
            sink.write_at(0, memoryview(data))
        assert caught.value.errno == errno.ENOSPC
        sink.abandon()
        assert store.entries("g") == []
        write(store, "g/shard", data[: 512 << 10])  # the space is free again

    def test_a_full_disk_keeps_the_document_that_was_there(self, tiny: Path) -> None:
        store = open_store(os.fspath(tiny))
        store.put("LATEST", b"old")
        with pytest.raises(StorageError, match=r"tiny/LATEST.*free space"):
            store.put("LATEST", bytes(2 << 20))
        assert store.get("LATEST", limit=3) == b"old"
        assert [entry.name for entry in store.entries("")] == ["LATEST"]


class TestLinks:
    @pytest.fixture
    def secret(self, tmp_path: Path) -> Path:
        secret = tmp_path / "secret"
        secret.write_bytes(b"secret")
        return secret

    @pytest.mark.parametrize("inside", [True, False])
    def test_a_link_in_place_of_a_file_is_never_read(
        self, store: Store, secret: Path, inside: bool
    ) -> None:
        store.put("g/real", b"real")
        target = Path(store.url, "g/real") if inside else secret
        Path(store.url, "g/manifest.json").symlink_to(target)
        with pytest.raises(StorageError, match=r"manifest\.json.*symbolic link"):
            store.get("g/manifest.json", limit=99)
        with pytest.raises(StorageError, match="symbolic link"):
            store.read_into("g/manifest.json", 0, memoryview(bytearray(4)))
        with pytest.raises(StorageError, match="symbolic link"):
            store.link("g/manifest.json", "g/copy")
        assert [entry.name for entry in store.entries("g")] == ["real"]

    def test_a_link_in_place_of_a_file_is_replaced_not_written_through(
        self, store: Store, secret: Path
    ) -> None:
        link = Path(store.url, "g/x")
        link.symlink_to(secret)
        with pytest.raises(StorageError, match=r"g/x.*taken"):
            store.create("g/x", 4)
        store.put("g/x", b"new")
        assert secret.read_bytes() == b"secret"
        assert not link.is_symlink()

    def test_a_folder_that_leads_out_of_the_root_is_refused(
        self, store: Store, secret: Path
    ) -> None:
        Path(store.url, "out").symlink_to(secret.parent)
        Path(store.url, "g/out").symlink_to("../..")
        for name in ("out/secret", "g/out/secret"):
            with pytest.raises(StorageError, match="leaves"):
                store.get(name, limit=99)
            with pytest.raises(StorageError, match="leaves"):
                store.put(name, b"")
            with pytest.raises(StorageError, match="leaves"):
                store.delete(name)
            with pytest.raises(StorageError, match="leaves"):
                store.entries(name.rpartition("/")[0])
        assert store.folders() == ["g"]
        assert secret.read_bytes() == b"secret"

    def test_a_folder_linked_within_the_root_can_be_read(self, store: Store) -> None:
        store.put("g/manifest.json", b"{}")
        Path(store.url, "last").symlink_to("g")
        assert store.get("last/manifest.json", limit=2) == b"{}"
        assert len(store.entries("last")) == 1
        assert store.folders() == ["g"]

    def test_a_pipe_or_folder_in_place_of_a_file_does_not_hang(self, store: Store) -> None:
        os.mkfifo(Path(store.url, "g/pipe"))
        store.make_folder("g/folder")
        for name in ("g/pipe", "g/folder"):
            with pytest.raises(StorageError, match="not a regular file"):
                store.get(name, limit=9)
        assert store.entries("g") == []


class TestErrors:
    def test_a_missing_folder_is_named_with_the_next_move(self, store: Store) -> None:
        with pytest.raises(StorageError, match=r"none/x.*make that first"):
            store.put("none/x", b"")
        with pytest.raises(StorageError, match=r"none/x.*make that first"):
            store.create("none/x", 1)

    def test_a_name_in_use_is_not_created_or_linked_over(self, store: Store) -> None:
        store.put("g/a", b"a")
        store.put("g/b", b"b")
        with pytest.raises(StorageError, match=r"g/a.*taken"):
            store.create("g/a", 1)
        with pytest.raises(StorageError, match=r"g/a.*taken"):
            store.link("g/b", "g/a")
        assert store.get("g/a", limit=1) == b"a"

    def test_a_file_where_a_folder_should_be_is_said(self, store: Store) -> None:
        store.put("file.ckpt", b"an older kind of checkpoint")
        with pytest.raises(FileNotFoundError):
            store.get("file.ckpt/manifest.json", limit=9)
        assert store.entries("file.ckpt") == []
        with pytest.raises(StorageError, match=r"file\.ckpt"):
            store.make_folder("file.ckpt")
        with pytest.raises(StorageError, match="file stands where"):
            store.put("file.ckpt/manifest.json", b"")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_read_only_folder_is_said(self, store: Store) -> None:
        os.chmod(Path(store.url, "g"), 0o500)
        with pytest.raises(StorageError, match="permission"):
            store.put("g/x", b"")

    def test_an_error_survives_pickling(self, store: Store) -> None:
        with pytest.raises(StorageError) as caught:
            store.put("none/x", b"")
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is StorageError
        assert str(again) == str(caught.value)
        assert again.errno == errno.ENOENT


class TestOpening:
    @pytest.mark.parametrize("prefix", ["", "file://", "local://"])
    def test_paths_and_file_urls_are_local_and_absolute(self, tmp_path: Path, prefix: str) -> None:
        assert open_store(f"{prefix}{tmp_path}/run/").url == f"{tmp_path}/run"

    def test_a_relative_path_stays_where_it_was_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        store = open_store("runs/a")
        monkeypatch.chdir("/")
        store.make_folder("g")
        assert (tmp_path / "runs/a/g").is_dir()

    def test_a_path_object_and_a_colon_in_a_path_are_fine(self, tmp_path: Path) -> None:
        assert open_store(tmp_path / "a:b::c").url == f"{tmp_path}/a:b::c"

    def test_options_for_a_local_path_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="anon"):
            open_store(os.fspath(tmp_path), {"anon": True})

    def test_an_unknown_scheme_is_refused_by_name(self) -> None:
        with pytest.raises(ConfigError, match="nosuch"):
            open_store("nosuch://bucket/run")

    def test_local_stores_start_without_fsspec_torch_or_numpy(self, tmp_path: Path) -> None:
        code = (
            "import sys; from torch_ckpt.storage.store import open_store; "
            "s = open_store(sys.argv[1]); s.make_folder('g'); s.put('g/x', b''); "
            "k = s.create('g/y', 1); k.write_at(0, memoryview(b'1')); k.finish(); "
            "bad = {'fsspec', 'torch', 'numpy', 'asyncio', 'ctypes'} & set(sys.modules); "
            "sys.exit(str(bad) if bad else 0)"
        )
        subprocess.run([sys.executable, "-c", code, os.fspath(tmp_path / "run")], check=True)


class TestUploads:
    def test_what_a_killed_upload_left_is_under_another_name_and_can_be_aborted(
        self, store: Store
    ) -> None:
        code = (
            "import os, sys; from torch_ckpt.storage.store import open_store\n"
            "def read(offset, target):\n"
            "    if offset: os.kill(os.getpid(), 9)\n"
            "    return len(target)\n"
            "open_store(sys.argv[1]).upload('g/shard', 20 << 20, read)\n"
        )
        assert subprocess.run([sys.executable, "-c", code, store.url]).returncode == -9
        store.put("g/manifest.json", b"{}")
        left = [entry.name for entry in store.entries("g") if entry.name != "manifest.json"]
        assert len(left) == 1
        assert re.fullmatch(r"shard\.[0-9a-f]{8}\.tmp", left[0])
        assert store.abort_uploads("g", older_than_s=3600.0) == 0
        assert store.abort_uploads("g", of="other") == 0
        assert store.abort_uploads("", of="shard") == 1
        assert [entry.name for entry in store.entries("g")] == ["manifest.json"]

    def test_an_upload_into_a_missing_folder_is_refused_by_name(self, store: Store) -> None:
        with pytest.raises(StorageError, match="none/x"):
            store.upload("none/x", 1, lambda offset, target: 1)

    def test_every_thread_of_an_upload_ends_before_it_returns(self, store: Store) -> None:
        before = threading.active_count()

        def read(offset: int, target: memoryview) -> int:
            if offset == 16 << 20:
                raise KeyError("one of several threads")
            return len(target)

        with pytest.raises(KeyError, match="one of several"):
            store.upload("g/x", 100 << 20, read)
        assert threading.active_count() == before
        assert store.entries("g") == []


class TestLimits:
    def test_reads_of_many_files_work_with_few_descriptors(self, store: Store) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd"))
        for index in range(300):
            store.put(f"g/{index}", b"%d" % index)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
        try:

            def read(index: int) -> bytes:
                buffer = bytearray(3)
                count = store.read_into(f"g/{index % 300}", 0, memoryview(buffer))
                return bytes(buffer[:count])

            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(read, range(1200))) == [b"%d" % (i % 300) for i in range(1200)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_no_descriptor_stays_open(self, store: Store) -> None:
        before = set(os.listdir("/proc/self/fd"))
        write(store, "g/a", b"a" * 5000)
        store.link("g/a", "g/b")
        store.get("g/b", limit=5000)
        store.create("g/c", 10).abandon()
        for failing in (lambda: store.get("none/x", limit=1), lambda: store.create("none/x", 1)):
            with pytest.raises((StorageError, FileNotFoundError)):
                failing()
        assert set(os.listdir("/proc/self/fd")) == before

    def test_files_get_the_permissions_that_the_umask_leaves(self, store: Store) -> None:
        old = os.umask(0o027)
        try:
            store.put("g/x", b"")
            write(store, "g/y", b"1")
        finally:
            os.umask(old)
        for name in ("g/x", "g/y"):
            assert stat.S_IMODE(os.stat(Path(store.url, name)).st_mode) == 0o640


class TestCopiesInsteadOfLinks:
    def test_a_copy_stands_in_where_links_are_unsupported(self, store: Store) -> None:
        """Two file systems: a real one that refuses the link."""
        if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(store.url).st_dev:
            pytest.skip("needs a second file system at /dev/shm")
        data = os.urandom(300_001)
        write(store, "g/shard", data)
        target = f"/dev/shm/torch-ckpt-test-{os.getpid()}"
        try:
            durable.link_file(os.path.join(store.url, "g/shard"), target)
            assert Path(target).read_bytes() == data
            with pytest.raises(FileExistsError):
                durable.link_file(os.path.join(store.url, "g/shard"), target)
            assert Path(target).read_bytes() == data
        finally:
            os.unlink(target)

    def test_hard_links_share_the_bytes(self, store: Store) -> None:
        write(store, "g/a", b"1")
        store.link("g/a", "g/b")
        assert os.path.samefile(Path(store.url, "g/a"), Path(store.url, "g/b"))


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
class TestOrder:
    def trace(self, tmp_path: Path, body: str, *options: str) -> list[str]:
        """The names of the calls that touch files of the store, in order, each with its path."""
        root = tmp_path / "run"
        code = (
            "import sys; from torch_ckpt.storage.store import open_store; "
            f"s = open_store(sys.argv[1]); s.make_folder('g'); s.put('g/first', b'1'); {body}"
        )
        log = tmp_path / "log"
        calls = "trace=fsync,write,pwrite64,rename,unlink,rmdir,mkdir,ftruncate,link,linkat"
        command = ["strace", "-f", "-qq", "-y", "-o", os.fspath(log), "-e", calls, *options]
        done = subprocess.run(
            [*command, sys.executable, "-c", code, os.fspath(root)], capture_output=True, text=True
        )
        if "ptrace" in done.stderr and "not permitted" in done.stderr:
            pytest.skip("strace may not attach here")
        assert done.returncode == 0, done.stderr
        here = re.compile(rf"(\w+)\(.*?{re.escape(os.fspath(root))}([^\s\">]*)")
        touched = filter(None, map(here.search, log.read_text().splitlines()))
        found = [
            f"{match[1]} {re.sub('[.][0-9a-f]+[.]tmp', '.tmp', match[2])}".strip()
            for match in touched
        ]
        return found[found.index("rename /g/first.tmp") + 2 :]

    def test_a_document_is_durable_before_and_after_its_rename(self, tmp_path: Path) -> None:
        assert self.trace(tmp_path, "s.put('g/x', b'data')") == [
            "write /g/x.tmp",
            "fsync /g/x.tmp",
            "rename /g/x.tmp",
            "fsync /g",
        ]

    def test_a_shard_and_its_name_are_durable_when_finished(self, tmp_path: Path) -> None:
        body = "k = s.create('g/s', 5); k.write_at(0, memoryview(b'12345')); k.finish()"
        calls = self.trace(tmp_path, body)
        assert calls[-4:] == [
            "ftruncate /g/s.tmp",
            "fsync /g/s.tmp",
            "rename /g/s.tmp",
            "fsync /g",
        ]

    def test_a_deletion_is_durable_before_the_next_one(self, tmp_path: Path) -> None:
        calls = self.trace(tmp_path, "s.delete('g/first'); s.delete_folder('g')")
        assert calls == ["unlink /g/first", "fsync /g", "rmdir /g", "fsync"]

    def test_each_new_folder_is_durable_in_its_parent(self, tmp_path: Path) -> None:
        calls = self.trace(tmp_path, "s.make_folder('h/i')")
        assert calls == ["mkdir /h", "fsync", "mkdir /h/i", "fsync /h"]

    # fsync 1 and 2 are of the two folders, 3 and 4 of the first document, 5 of the second.
    @pytest.mark.parametrize("fault", ["fsync:error=EIO:when=5", "rename:error=ENOSPC:when=2"])
    def test_a_failed_step_keeps_the_old_document_and_leaves_no_litter(
        self, tmp_path: Path, fault: str
    ) -> None:
        body = (
            "from torch_ckpt.errors import StorageError\n"
            "try: s.put('g/first', b'2')\n"
            "except StorageError as error: assert 'g/first' in str(error), error\n"
            "else: sys.exit('no error')\n"
            "assert s.get('g/first', limit=1) == b'1'\n"
            "assert len(s.entries('g')) == 1, s.entries('g')\n"
        )
        self.trace(tmp_path, body, "-e", f"inject={fault}")
