"""Storage that is full, small or stuck, and few descriptors, cost a save and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash import programs, tracing
from tests.crash.conftest import Resume, Start
from tests.crash.programs import LARGE

MiB = 1 << 20
Mount = Callable[[str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts file systems of a given size, in memory; skips the test where that is forbidden."""
    mounted: list[Path] = []

    def mount_one(size: str) -> Path:
        place = tmp_path / f"small-{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount_one
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


def used(place: Path) -> int:
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def test_a_full_disk_fails_the_save_frees_what_it_took_and_the_next_one_works(
    start: Start, resume: Resume, mount: Mount
) -> None:
    disk = mount("24m")
    root, filler = disk / "run", disk / "filler"
    filler.write_bytes(bytes(22 * MiB))
    trainer = start(programs.train_on_demand, str(root), {})
    trainer.say(1)
    assert trainer.hear_dict()["state"] == "committed"
    before = used(disk)
    filler.write_bytes(bytes(filler.stat().st_size + 24 * MiB - used(disk) - 6000))
    for step in (2, 3):  # again and again, without piling anything up
        trainer.say(step)
        said = trainer.hear_dict()
        assert said["state"] == "failed"
        assert "No space left on device; free space there" in said["error"]
    os.truncate(filler, 22 * MiB)
    assert used(disk) <= before + 4096
    assert [path.name for path in root.iterdir() if path.is_dir()] == ["step-0000000001"]
    os.truncate(filler, MiB)
    trainer.say(4)
    assert trainer.hear_dict()["state"] == "committed"
    trainer.finish()
    found = resume(root)
    assert (found["step"], found["differs"]) == (4, [])


def test_a_disk_with_no_room_for_the_bytes_of_a_large_state_fails_as_clearly(
    start: Start, resume: Resume, mount: Mount
) -> None:
    disk = mount("100m")
    trainer = start(programs.train_large, str(disk / "run"))
    said = trainer.hear_dict()
    assert said["state"] == "committed"
    said = trainer.hear_dict()  # old and new do not fit both
    assert said["state"] == "failed"
    assert "No space left on device" in said["error"]
    assert used(disk) < 90 * MiB
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
    trainer.say()
    assert trainer.hear_dict()["state"] == "committed"
    trainer.finish()
    found = resume(disk / "run", size=LARGE)
    assert (found["step"], found["differs"]) == (3, [])


@pytest.mark.skipif(tracing.why_not() is not None, reason=str(tracing.why_not()))
def test_a_full_disk_that_refuses_latest_is_pruned_all_the_same(
    start: Start, tmp_path: Path
) -> None:
    trainer = start(programs.train_on_demand, str(tmp_path), {})
    trainer.say(1)
    writer = trainer.hear_dict()["writer"]
    with tracing.injection(tracing.threads(writer)[1], "write", "error=ENOSPC", 3):
        trainer.say(2)
        said = trainer.hear_dict()
    assert said["state"] == "committed"
    assert any("LATEST" in line for line in said["log"]), said["log"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-0000000002"]
    trainer.finish()


def test_a_tmpdir_of_one_megabyte_is_enough(start: Start, resume: Resume, mount: Mount) -> None:
    small = mount("1m")
    root = small.parent / "run"
    trainer = start(programs.small_tmpdir, str(root), str(small))
    assert trainer.hear_dict()["state"] == "committed"
    assert trainer.join() == 0
    assert list(small.iterdir()) == []
    assert resume(root, size=LARGE)["differs"] == []


def test_20000_small_tensors_need_fewer_than_256_descriptors(start: Start, tmp_path: Path) -> None:
    trainer = start(programs.many_tensors, str(tmp_path), 20_000, 256)
    assert trainer.hear_dict() == {"step": 2, "wrong": []}
    assert trainer.join() == 0


def test_200_saves_against_blocked_storage_take_no_more_memory_than_two_slabs(
    start: Start, tmp_path: Path
) -> None:
    size = 2_000_000  # 8 MB
    trainer = start(programs.save_against_blocked_storage, str(tmp_path), 200, size)
    writer = trainer.hear_dict()["writer"]
    os.kill(writer, signal.SIGSTOP)
    trainer.say()
    early, late = trainer.hear_dict(), trainer.hear_dict()
    os.kill(writer, signal.SIGCONT)
    assert late["skipped"] == 198
    assert late["bytes"] - early["bytes"] < 4 * MiB
    trainer.say()
    assert trainer.hear_dict()["committed"] == [4]
    trainer.finish()
