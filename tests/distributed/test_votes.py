"""A generation is committed with all ranks' shares or not at all, whoever dies, stops or fails."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import torch_ckpt
from tests.crash import tracing
from tests.distributed import votes_programs as programs
from tests.distributed.ranks import run_ranks

RANKS = 3
COORDINATOR, VICTIM, BYSTANDER = 0, programs.VICTIM, 2
TIMEOUT_S = 4.0

needs_strace = pytest.mark.skipif(
    tracing.why_not() is not None, reason=f"{tracing.why_not()}; nothing fails as ordered"
)

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What each rank found in each of the failures that nobody needs to wait for."""
    folder = tmp_path_factory.mktemp("prompt")
    results = run_ranks(folder / "ranks", programs.fail_promptly, RANKS, str(folder / "run"))
    return _by_failure(results)


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """The same for failures that only the time-out ends."""
    folder = tmp_path_factory.mktemp("silent")
    root = str(folder / "run")
    return _by_failure(run_ranks(folder / "ranks", programs.fail_silently, RANKS, root, TIMEOUT_S))


def _by_failure(results: list[Any]) -> dict[str, Found]:
    for result in results:
        assert isinstance(result, dict), result
    return {how: [result[how] for result in results] for how in results[0]}


def _check_what_holds(found: Found) -> None:
    for rank, one in enumerate(found):
        assert one["stands"], f"rank {rank} does not get the generation before"
        assert one["next"] is None, "training goes on and the next save commits"
        assert one["told"] is not None, f"rank {rank} never learned of the failure"
        assert "the previous generation stands" in one["told"]
        assert one["left after the next"] == [], "files of the failed attempt pile up"


@needs_strace
@pytest.mark.parametrize("how", ["ENOSPC on the shard", "ENOSPC on the part"])
def test_a_full_disk_on_one_rank_is_heard_at_once_and_frees_what_the_others_wrote(
    prompt: dict[str, Found], how: str
) -> None:
    found = prompt[how]
    _check_what_holds(found)
    assert "rank 1 gave up" in found[COORDINATOR]["error"]
    assert "No space left" in found[COORDINATOR]["error"]
    assert "No space left" in found[VICTIM]["error"]
    assert found[COORDINATOR]["took_s"] < 50, "the time-out is 100 s"
    assert not [name for name in found[COORDINATOR]["left"] if "safetensors" in name]


@needs_strace
def test_a_killed_writer_is_heard_by_the_coordinator_at_once(prompt: dict[str, Found]) -> None:
    found = prompt["a writer killed"]
    _check_what_holds(found)
    assert "rank 1 gave up: its writer ended" in found[COORDINATOR]["error"]
    assert found[COORDINATOR]["took_s"] < 50, "the time-out is 100 s"


@needs_strace
def test_sigkill_of_the_coordinators_writer_between_the_last_part_and_the_manifest(
    prompt: dict[str, Found],
) -> None:
    found = prompt["the coordinator's writer killed before the manifest"]
    _check_what_holds(found)
    left = found[COORDINATOR]["left"]
    folder = next(name for name in left if "/" not in name)
    assert [name for name in left if name.endswith(".json")] == [
        f"{folder}/rank-{rank:05d}.json" for rank in range(RANKS)
    ], "all parts were there, and no manifest"
    assert found[BYSTANDER]["error"] is None, "its own share was written"
    assert "another rank's failed" in found[BYSTANDER]["told"]


@needs_strace
def test_all_writers_killed_at_once_cost_one_generation(prompt: dict[str, Found]) -> None:
    found = prompt["all writers killed"]
    _check_what_holds(found)
    assert all("its writer ended" in one["error"] for one in found)


@needs_strace
@pytest.mark.parametrize("how", programs.SILENT)
def test_a_rank_that_says_nothing_costs_the_time_out_and_that_generation(
    silent: dict[str, Found], how: str
) -> None:
    found = silent[how]
    _check_what_holds(found)
    assert "rank 1 did not finish its part within 4 s" in found[COORDINATOR]["error"]
    assert TIMEOUT_S <= found[COORDINATOR]["took_s"] < TIMEOUT_S + 15


def test_survivors_of_a_rank_that_dies_before_staging_hear_of_it(tmp_path: Path) -> None:
    results = run_ranks(tmp_path / "ranks", programs.survive, RANKS, str(tmp_path / "run"))
    assert isinstance(results[VICTIM], RuntimeError)
    assert "exit code -9" in str(results[VICTIM])
    coordinator, bystander = results[COORDINATOR], results[BYSTANDER]
    assert "rank 1 was killed before its part was finished" in coordinator["error"]
    assert coordinator["took_s"] < 50, "the time-out is 100 s"
    assert coordinator["next"] == bystander["next"] == "DisagreementError"
    assert programs.files(str(tmp_path / "run")) == [
        "step-0000000001",
        *("step-0000000001/manifest.json",),
        *(f"step-0000000001/rank-{rank:05d}.{end}" for rank in range(3) for end in ENDS),
    ]


ENDS = ("json", "safetensors")


def test_what_all_ranks_staged_commits_without_them_and_what_one_did_not_is_given_up_soon(
    tmp_path: Path,
) -> None:
    roots = {how: str(tmp_path / how) for how in ("all staged", "one was copying")}
    for how, root in roots.items():
        results = run_ranks(tmp_path / f"ranks of {how}", programs.die, RANKS, root, how)
        assert all("exit code -9" in str(result) for result in results)
    resumed = run_ranks(tmp_path / "ranks", programs.resume_all, RANKS, roots)
    for found in resumed:
        assert isinstance(found, dict), found
        assert found["all staged"]["step"] == 2
        assert found["one was copying"]["step"] == 1
        # The orphaned writer of rank 0 sees that the one of rank 1 is gone, and must not keep the
        # new trainers for the minute that it grants a rank of another node.
        assert found["one was copying"]["took_s"] < 30
        for one in found.values():
            assert one["same"]
            assert one["next"] == "committed"
        assert "step-0000000002" not in found["one was copying"]["files"]


def test_new_ranks_wait_together_for_writers_that_still_work(tmp_path: Path) -> None:
    """Longer than they otherwise wait for one another, and for no longer than they may."""
    root, note = str(tmp_path / "run"), tmp_path / "stopped"
    run_ranks(tmp_path / "dead", programs.die_writing, RANKS, root, str(note))
    stopped = int(note.read_text())
    try:
        late = run_ranks(tmp_path / "late", programs.resume_late, RANKS, root, 7.0)
        assert all(str(error).startswith("RunBusy: ") for error in late), late
        assert all("has not finished within 7 s" in error for error in late), late
        again = threading.Timer(12, os.kill, (stopped, signal.SIGCONT))
        again.start()
        found = run_ranks(tmp_path / "found", programs.resume_late, RANKS, root, 300.0)
        again.join()
        assert found == [(2, True)] * RANKS
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)


def test_roots_spelled_differently_and_skewed_clocks_make_one_generation_and_a_wrong_root_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    results = run_ranks(tmp_path / "ranks", programs.spell, RANKS, str(tmp_path))
    for found in results:
        assert isinstance(found, dict), found
        assert found["resumed"] == (2, True)
    coordinator, follower, stray = results
    for error in coordinator["wrong"]:
        assert "rank 2 did not finish its part within 3 s" in error
        assert f"does its root lead to {tmp_path / 'run'} too?" in error
    assert "the save of step 3 failed" in follower["told"]
    assert "the save of step 3 failed" in stray["told"]
    committed = sorted(path.parent.name for path in tmp_path.glob("run/*/manifest.json"))
    assert committed == ["step-0000000001", "step-0000000002"]
    assert list(tmp_path.glob("elsewhere/*/manifest.json")) == []


def test_no_decision_reads_the_time_of_day_or_of_a_file() -> None:
    """Clocks of ranks differ: what is compared is monotonic and of one process."""
    clocks = {"time", "time_ns", "now", "utcnow", "today", "st_mtime", "st_mtime_ns", "st_ctime"}
    clocks |= {"getmtime", "getctime", "localtime", "gmtime"}
    readers = {}
    package = Path(torch_ckpt.__file__).parent
    for path in package.rglob("*.py"):
        names = [
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and node.attr in clocks
        ]
        if names:
            readers[str(path.relative_to(package))] = names
    # `created` of the manifest, which is for people; when credentials run out; and how old what a
    # killed upload left behind is.
    allowed = {"save.py", "dcp/writer.py", "storage/clients.py", "storage/local.py"}
    allowed |= {"storage/bucket.py"}
    assert readers.keys() == allowed, readers
