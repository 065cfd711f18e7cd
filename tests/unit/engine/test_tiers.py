"""One run in three tiers: what is where, what leaves, and where a run comes back from."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import signal
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.tiered import flip, resume, shard, state_of, steps_in, tiers, train
from torch_ckpt import Checkpointer, CkptError, KeepEvery, KeepLast, load_generation
from torch_ckpt.errors import ArchiveTaken, ConfigError, NotArchived, SaveSkipped, StorageError
from torch_ckpt.manifest.layout import RUN


class Ranged(SimpleHTTPRequestHandler):
    """What any real web server does, and the standard library's does not: byte ranges."""

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return super().do_GET()
        data = Path(self.translate_path(self.path)).read_bytes()
        first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        if first > last:
            return self.send_error(416)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        self.wfile.write(data[first : last + 1])
        return None

    def log_message(self, format: str, *args: object) -> None: ...


def test_each_generation_is_archived_byte_for_byte_and_the_root_keeps_one(tmp_path: Path) -> None:
    train(tmp_path, 1, 2, 3)
    assert steps_in(tmp_path / "archive") == [1, 2, 3]
    assert steps_in(tmp_path / "root") == steps_in(tmp_path / "cache") == [3]
    for tier in ("archive", "cache"):
        for path in (tmp_path / "root" / "step-0000000003").iterdir():
            assert (tmp_path / tier / path.parent.name / path.name).read_bytes() == (
                path.read_bytes()
            )
    assert load_generation(tmp_path / "archive", 1)["step"] == 1


def test_a_run_comes_back_from_the_nearest_tier(tmp_path: Path) -> None:
    train(tmp_path, 1, 2)
    assert resume(tmp_path) == (2, "cache")
    shutil.rmtree(tmp_path / "cache")
    assert resume(tmp_path) == (2, "root")
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "root")
    assert resume(tmp_path) == (2, "archive")
    assert resume(tmp_path) == (2, "cache"), "reading it from the archive filled the cache"


def test_the_newest_generation_wins_whatever_tier_holds_it(tmp_path: Path) -> None:
    train(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "cache")
    train(tmp_path, 3, cache=None)
    shutil.rmtree(tmp_path / "root" / "step-0000000003")
    assert resume(tmp_path) == (3, "archive")


def test_a_damaged_copy_costs_no_generation_that_another_tier_has(tmp_path: Path) -> None:
    train(tmp_path, 1, 2)
    flip(shard(tmp_path / "cache", 2))
    assert resume(tmp_path) == (2, "root")
    shutil.rmtree(tmp_path / "cache")
    flip(shard(tmp_path / "root", 2))
    assert resume(tmp_path) == (2, "archive")
    shutil.rmtree(tmp_path / "cache")
    assert resume(tmp_path) == (2, "archive"), "the damaged copy is remembered as such"
    shutil.rmtree(tmp_path / "cache")
    flip(shard(tmp_path / "archive", 2))
    assert resume(tmp_path) == (1, "archive"), "no tier has step 2 whole"


def test_nothing_leaves_the_root_before_the_archive_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "archive").write_text("not a folder: an archive that is down")
    with (
        caplog.at_level(logging.WARNING),
        tiers(tmp_path, archive_timeout_s=0) as checkpointer,
    ):
        for step in (1, 2, 3):
            checkpointer.save(state_of(step), step, block="committed")
        assert steps_in(tmp_path / "root") == [1, 2, 3]
        assert checkpointer.archive_lag == 3
    lines = [line for line in caplog.messages if "wait for" in line]
    assert len(lines) == 1, "one line a minute"
    (tmp_path / "archive").unlink()
    train(tmp_path, 4)
    assert steps_in(tmp_path / "archive") == [1, 2, 3, 4]
    assert steps_in(tmp_path / "root") == [4]


def test_one_generation_that_is_never_taken_holds_up_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "archive" / "step-0000000002"
    in_the_way.parent.mkdir()
    in_the_way.write_text("not a folder")
    with caplog.at_level(logging.WARNING), tiers(tmp_path) as checkpointer:
        saves = [checkpointer.save(state_of(step), step, block="committed") for step in (1, 2, 3)]
        for held_up in (saves[0], saves[2]):
            held_up.wait("archived", 60)
        assert checkpointer.archive_lag == 1
        assert steps_in(tmp_path / "root") == [2, 3]
        in_the_way.unlink()
        saves[1].wait("archived", 60)
    assert steps_in(tmp_path / "archive") == [1, 2, 3]
    assert len([line for line in caplog.messages if "wait for" in line]) == 1


def test_what_the_archive_would_drop_at_once_does_not_fill_the_root(tmp_path: Path) -> None:
    (tmp_path / "archive").write_text("down")
    options = {"archive_timeout_s": 0, "keep_archive": KeepLast(2) | KeepEvery(4)}
    with tiers(tmp_path, **options) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(state_of(step), step, block="committed")
        assert steps_in(tmp_path / "root") == [4, 5, 6]


def test_the_archive_is_pruned_by_its_own_rule(tmp_path: Path) -> None:
    train(tmp_path, 1, 2, 3, 4, 5, keep_archive=KeepLast(1) | KeepEvery(2))
    assert steps_in(tmp_path / "archive") == [2, 4, 5]


def test_permanent_every_keeps_steps_in_the_archive(tmp_path: Path) -> None:
    train(tmp_path, 1, 2, 3, keep_archive=KeepLast(1), permanent_every=2)
    assert steps_in(tmp_path / "archive") == [2, 3]


def test_close_does_not_wait_for_what_was_pruned_as_soon_as_it_was_archived(tmp_path: Path) -> None:
    with tiers(tmp_path, archive_timeout_s=100) as checkpointer:
        for step in range(1, 13):
            checkpointer.save({"step": step}, step).wait("archived", 60)
        began = time.monotonic()
    assert time.monotonic() - began < 30


def test_a_permanent_generation_leaves_the_root_and_stays_in_the_archive(tmp_path: Path) -> None:
    with tiers(tmp_path, keep_archive=KeepLast(1)) as checkpointer:
        checkpointer.save(state_of(1), 1, tags=["permanent"]).wait("archived", 60)
        checkpointer.save(state_of(2), 2).wait("archived", 60)
        checkpointer.save(state_of(3), 3).wait("archived", 60)
    assert steps_in(tmp_path / "archive") == [1, 3]
    assert steps_in(tmp_path / "root") == [3]


def test_a_shard_that_arrived_is_not_sent_again(tmp_path: Path) -> None:
    train(tmp_path, 1)
    arrived = shard(tmp_path / "archive", 1)
    before = arrived.stat()
    for name in ("manifest.json", "LATEST"):
        next((tmp_path / "archive").rglob(name)).unlink()
    next(tmp_path.glob("archive/step-*/rank-*.json")).unlink()
    train(tmp_path, 2)
    after = arrived.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert steps_in(tmp_path / "archive") == [1, 2]


def test_a_torn_shard_in_the_archive_is_sent_again(tmp_path: Path) -> None:
    train(tmp_path, 1)
    arrived = shard(tmp_path / "archive", 1)
    whole = arrived.read_bytes()
    next(tmp_path.glob("archive/step-*/manifest.json")).unlink()
    next(tmp_path.glob("archive/step-*/rank-*.json")).unlink()
    arrived.write_bytes(whole[:5000])
    train(tmp_path, 2)
    assert shard(tmp_path / "archive", 1).read_bytes() == whole


def test_damaged_bytes_are_not_promoted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tiers(tmp_path, archive=None) as checkpointer:
        checkpointer.save(state_of(1), 1, block="committed")
    flip(shard(tmp_path / "root", 1))
    with caplog.at_level(logging.ERROR), tiers(tmp_path, keep=None) as checkpointer:
        checkpointer.resume(state_of(0))  # from the cache
        checkpointer.save(state_of(2), 2).wait("archived", 60)
    assert steps_in(tmp_path / "archive") == [2]
    assert any("step 1 is damaged and is not promoted" in line for line in caplog.messages)


def test_an_archive_belongs_to_one_run(tmp_path: Path) -> None:
    train(tmp_path, 1)
    before = sorted(path.name for path in (tmp_path / "archive").iterdir())
    other = Checkpointer(tmp_path / "other", archive=tmp_path / "archive", archive_timeout_s=0)
    pending = other.save(state_of(5), 5)
    with pytest.raises(NotArchived, match="is the archive of run"):
        pending.wait("archived", 60)
    with pytest.raises(ArchiveTaken, match="give this run a prefix of its own"):
        other.close()
    assert sorted(path.name for path in (tmp_path / "archive").iterdir()) == before
    assert pending.state == "committed"


def test_an_archive_without_its_note_still_belongs_to_the_run_in_it(tmp_path: Path) -> None:
    train(tmp_path, 1)
    (tmp_path / "archive" / RUN).unlink()
    other = Checkpointer(tmp_path / "other", archive=tmp_path / "archive", archive_timeout_s=0)
    with pytest.raises(NotArchived, match="is the archive of run"):
        other.save(state_of(5), 5).wait("archived", 60)
    with pytest.raises(ArchiveTaken):
        other.close()


def test_going_back_sets_aside_in_every_tier(tmp_path: Path) -> None:
    train(tmp_path, 1, 2, 3)
    state = state_of(0)
    with tiers(tmp_path) as checkpointer:
        generation = checkpointer.resume(state, step=2)
        assert generation is not None
        assert generation.step == 2
        tags = {one.step: set(one.tags) for one in checkpointer.generations()}
        assert tags == {1: set(), 2: set(), 3: {"aside"}}
        assert steps_in(tmp_path / "cache") == [2]
    shutil.rmtree(tmp_path / "root")
    assert resume(tmp_path)[0] == 2


def test_an_archive_that_does_not_answer_is_no_fresh_start(tmp_path: Path) -> None:
    train(tmp_path, 1)
    shutil.move(tmp_path / "archive", tmp_path / "away")
    (tmp_path / "archive").write_text("down")
    assert resume(tmp_path, archive_timeout_s=0, cache=None) == (1, "root")
    shutil.rmtree(tmp_path / "root")
    with (
        tiers(tmp_path, archive_timeout_s=0, cache=None) as checkpointer,
        pytest.raises(StorageError, match="archive tier does not answer"),
    ):
        checkpointer.resume(state_of(0))


def test_a_full_or_missing_cache_costs_no_save(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    train(tmp_path, 1, 2)
    assert steps_in(tmp_path / "archive") == [1, 2]
    assert resume(tmp_path) == (2, "root")


def test_a_save_elsewhere_is_not_archived(tmp_path: Path) -> None:
    with tiers(tmp_path) as checkpointer:
        pending = checkpointer.save(state_of(1), 1, folder=str(tmp_path / "else" / "where"))
        with pytest.raises(NotArchived, match="outside the root is not archived"):
            pending.wait("archived", 60)


def test_a_skipped_save_says_so_and_not_that_there_is_no_archive(tmp_path: Path) -> None:
    with tiers(tmp_path, slabs=1, on_busy="skip", fence="manual") as checkpointer:
        checkpointer.save({"step": 0}, 0).wait("archived", 60)
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        first = checkpointer.save(state_of(1), 1)
        skipped = checkpointer.save(state_of(2), 2)
        os.kill(checkpointer.writer_pid, signal.SIGCONT)
        assert skipped.state == "skipped"
        with pytest.raises(SaveSkipped, match="still being written"):
            skipped.wait("archived", 60)
        assert skipped.unarchived == "it was not committed: all slabs are still being written"
        first.wait("archived", 60)


def test_waiting_for_an_archive_that_a_run_has_not_is_an_error(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as checkpointer:
        pending = checkpointer.save(state_of(1), 1)
        with pytest.raises(NotArchived, match="this run has no archive"):
            pending.wait("archived", 60)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"archive": "root"}, "three different places"),
        ({"archive": "./root"}, "three different places"),
        ({"archive": "root/"}, "three different places"),
        ({"archive": "file://{here}/root"}, "three different places"),
        ({"cache": "{here}/root"}, "three different places"),
        ({"cache": "link"}, "three different places"),
        ({"cache": "s3://bucket/x"}, "this node's own disk"),
        ({"bandwidth_limit": 1}, "65536 bytes a second or more"),
        ({"bandwidth_limit": "fast"}, "bandwidth_limit must be bytes"),
        ({"archive_timeout_s": -1}, "archive_timeout_s must be"),
        ({"keep_archive": 3}, "keep_archive must be a rule"),
        ({"permanent_every": 0}, "KeepEvery.steps"),
        ({"archive": ""}, "archive must be a path or URL"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "root")
    here: dict[str, Any] = {
        name: value.format(here=tmp_path) if isinstance(value, str) else value
        for name, value in options.items()
    }
    with pytest.raises(ConfigError, match=says):
        Checkpointer("root", **here)


@pytest.mark.parametrize("archive", ["s3a://bucket/run/", "S3://bucket//run", "s3://bucket/run"])
def test_an_archive_that_is_the_root_in_other_words_is_refused(archive: str) -> None:
    with pytest.raises(ConfigError, match="three different places"):
        Checkpointer("s3://bucket/run", archive=archive)


def test_a_root_over_http_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="cannot be written"):
        Checkpointer("http://127.0.0.1:9/run")


def test_what_was_overtaken_while_the_archive_was_down_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "archive").write_text("down")
    with tiers(tmp_path, keep_archive=KeepLast(1)) as checkpointer:
        early = checkpointer.save(state_of(1), 1, block="committed")
        checkpointer.save(state_of(2), 2, block="committed")
        (tmp_path / "archive").unlink()
        checkpointer.save(state_of(3), 3).wait("archived", 60)
        with pytest.raises(NotArchived, match="rule does not keep it"):
            early.wait("archived", 60)
        assert checkpointer.archive_lag == 0
    assert steps_in(tmp_path / "root") == [3]


def test_a_bandwidth_limit_holds_up_the_archive_and_nothing_else(tmp_path: Path) -> None:
    options = {"bandwidth_limit": 1 << 20, "archive_timeout_s": 0}
    began = time.monotonic()
    with tiers(tmp_path, **options) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state_of(step), step, block="committed")
        assert checkpointer.archive_lag == 3
    assert time.monotonic() - began < 30, "three times 12 MB take half a minute at this limit"
    assert steps_in(tmp_path / "root") == [1, 2, 3]


def test_credentials_are_in_no_command_line_and_no_file(tmp_path: Path) -> None:
    secret = "not-for-everybody-to-see"
    options = {"key": "me", "secret": secret, "endpoint_url": "http://127.0.0.1:9"}
    given = {"archive": "s3://bucket/run", "archive_options": options, "archive_timeout_s": 0}
    with tiers(tmp_path, **given) as checkpointer:
        checkpointer.save(state_of(1), 1, block="committed")
        command = Path(f"/proc/{checkpointer.writer_pid}/cmdline").read_bytes()
    assert secret.encode() not in command
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes()


def test_a_read_only_archive_over_http_gives_a_run_its_start(tmp_path: Path) -> None:
    train(tmp_path, 1, 2)
    handler = functools.partial(Ranged, directory=str(tmp_path / "archive"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            state = state_of(0)
            url = f"http://127.0.0.1:{server.server_port}"
            with Checkpointer(tmp_path / "fresh", archive=url) as checkpointer:
                generation = checkpointer.resume(state)
                assert generation is not None
                assert generation.step == state["step"] == 2
                assert torch.equal(state["large"], state_of(2)["large"])
                pending = checkpointer.save(state_of(3), 3)
                with pytest.raises(NotArchived, match="over HTTP is only read"):
                    pending.wait("archived", 60)
        finally:
            server.shutdown()
            serving.join()
