"""A load that fails on one rank ends on all of them, soon and with that error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import failing_job as job
from tests.distributed.ranks import run_ranks

RANKS, VICTIM = 3, job.VICTIM


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Steps 1 and 2, saved by three ranks."""
    folder = tmp_path_factory.mktemp("saved")
    root = str(folder / "run")
    assert run_ranks(folder / "ranks", job.save_two, RANKS, root) == [None] * RANKS
    return root


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, root: str) -> list[dict[str, Any]]:
    """How every rank left each of the loads."""
    results = run_ranks(tmp_path_factory.mktemp("failed") / "ranks", job.fail, RANKS, root)
    for result in results:
        assert isinstance(result, dict), result
    return results


def check(found: list[dict[str, Any]], how: str, kind: str, text: str) -> None:
    for rank, one in enumerate(found):
        assert one[how].get("kind") == (kind if rank == VICTIM else "DisagreementError"), one[how]
        assert text in one[how]["error"]
        if rank != VICTIM:
            assert "rank 1 cannot load step-0000000002" in one[how]["error"]
        assert one[how]["took_s"] < 60


def test_a_structure_that_does_not_fit_on_one_rank_ends_the_load_on_all(
    found: list[dict[str, Any]],
) -> None:
    check(found, "structure", "StateMismatch", "missing from the generation: more")


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("load_state_dict", "StateMismatch", "not today"),
        ("a file of the user's", "FileNotFoundError", "gone.txt"),
        ("anything", "ZeroDivisionError", "by zero"),
    ],
)
def test_an_exception_in_load_state_dict_on_one_rank_ends_the_load_on_all_and_is_no_damage(
    found: list[dict[str, Any]], how: str, kind: str, text: str
) -> None:
    check(found, how, kind, text)


@pytest.mark.parametrize("placement", ["S(0)", "R"])
def test_what_one_rank_alone_sees_damaged_ends_the_load_on_all_and_is_not_quarantined(
    found: list[dict[str, Any]], placement: str
) -> None:
    for how, text in (("bytes", "SHA-256"), ("a shard", "rank-00002"), ("memory", "no room")):
        for one in found:
            outcome = one[f"{how}, {placement}"]
            if how == "a shard" and outcome.get("result") == 2:
                continue  # nothing of that shard was for that rank to read
            assert text in outcome["error"], outcome
            assert outcome["took_s"] < 60


@pytest.mark.parametrize("placement", ["S(0)", "R"])
def test_a_rank_with_a_stale_listing_ends_the_load_on_all(
    found: list[dict[str, Any]], placement: str
) -> None:
    for one in found:
        assert "rank 1 does not see step-0000000002" in one[f"listing, {placement}"]["error"]


def test_after_all_that_the_newest_generation_is_still_the_one_to_resume(
    found: list[dict[str, Any]],
) -> None:
    for one in found:
        assert one["in the end"]["result"] == 2
        assert one["value"] == 2.0
        assert one["tags"] == [0, 0]


def test_a_rank_that_is_killed_while_it_loads_ends_the_load_on_all(
    tmp_path: Path, root: str
) -> None:
    results = run_ranks(tmp_path / "ranks", job.die_loading, RANKS, root)
    assert "exit code -9" in str(results[VICTIM])
    for rank in (0, 2):
        for outcome in (results[rank], results[rank]["again"]):
            assert outcome["kind"] == "DisagreementError", outcome
            assert outcome["took_s"] < 60
