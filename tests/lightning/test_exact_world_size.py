"""A run goes on with another number of ranks, and the data of its epoch goes on with it."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.job import run_ranks
from tests.running import Done

SAMPLES, BATCH, EPOCHS = 48, 2, 3


def job_in(folder: Path, **changed: Any) -> dict[str, Any]:
    return {
        "module": "tests.lightning.world_size_job",
        "folder": str(folder / "work"),
        "root": str(folder / "run"),
        "samples": SAMPLES,
        "batch": BATCH,
        **changed,
    }


def train(job: dict[str, Any], ranks: int, *, until: int = -1, **changed: Any) -> list[Done]:
    """Train on so many ranks, up to a step or to the end."""
    options = {"max_epochs": EPOCHS, "max_steps": until, "strategy": "ddp", "devices": ranks}
    options |= changed.pop("trainer", {})
    if ranks == 1:
        options["strategy"] = "auto"
    done = run_ranks({**job, "trainer": options, **changed}, ranks)
    for rank in done:
        assert rank.code == 0, rank.log[-3000:]
    return done


def seen(*runs: list[Done]) -> dict[int, Counter[int]]:
    """How often each sample was trained on, in each epoch."""
    counts: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(EPOCHS)}
    for ranks in runs:
        for rank in ranks:
            for line in said(rank, "batch"):
                counts[line["epoch"]].update(line["ids"])
    return counts


def said(rank: Done, what: str) -> list[dict[str, Any]]:
    return [line for line in rank.lines if line["what"] == what]


def assert_each_once(*runs: list[Done]) -> None:
    for epoch, counts in seen(*runs).items():
        assert counts == Counter(range(SAMPLES)), epoch


@pytest.mark.parametrize(
    ("before", "after", "options"),
    [
        (2, 1, {"workers": 1}),
        (1, 2, {"shuffle": False}),
        (1, 2, {}),
        (1, 3, {"workers": 1, "persistent": True}),
        (2, 3, {}),
    ],
)
def test_each_sample_of_an_epoch_is_seen_once_by_the_ranks_before_and_after(
    tmp_path: Path, before: int, after: int, options: dict[str, Any]
) -> None:
    job = job_in(tmp_path, **options)
    steps = SAMPLES // BATCH // before  # of an epoch
    first = train(job, before, until=steps + 6 // before)
    shutil.copytree(job["root"], tmp_path / "again")
    second = train(job, after, seed=1)
    assert_each_once(first, second)
    assert f"world size {before}, resumed with {after}: the 36 samples left" in second[0].log
    states = [said(rank, "batch")[0]["rng"] for rank in second]
    assert len(set(states)) == after
    again = train({**job, "root": str(tmp_path / "again")}, after, seed=2)
    assert [rank.lines for rank in again] == [rank.lines for rank in second]


def test_an_epoch_is_continued_by_one_number_of_ranks_after_the_other(tmp_path: Path) -> None:
    job = job_in(tmp_path, validate=True)
    runs = [
        train(job, 2, until=15),  # 12 of the 48 samples of epoch 1 were seen
        train(job, 1, until=18, seed=1),  # 18
        train(job, 1, until=21, seed=2),  # 24
        train(job, 3, until=23, seed=3),  # 36
        train(job, 2, seed=4),
    ]
    assert_each_once(*runs)
    ends = [line["epoch"] for run in runs for line in said(run[0], "validation")]
    assert ends == [0, 1, 2]


def test_ranks_that_come_back_to_an_epoch_dealt_out_anew_continue_it_exactly(
    tmp_path: Path,
) -> None:
    job = job_in(tmp_path)
    train(job, 2, until=15)
    shutil.copytree(job["root"], tmp_path / "again")
    whole = train({**job, "root": str(tmp_path / "again")}, 3)
    parts = [train(job, 3, until=18), train(job, 3, seed=1)]
    for rank in range(3):
        batches = [line for part in parts for line in said(part[rank], "batch")]
        assert batches == said(whole[rank], "batch")


def test_samples_are_repeated_only_to_make_the_last_shares_equal(tmp_path: Path) -> None:
    job = job_in(tmp_path, samples=44)
    first = train(job, 2, until=11 + 3, trainer={"max_epochs": 2})
    second = train(job, 3, trainer={"max_epochs": 2})
    counts = seen(first, second)[1]
    assert set(counts) == set(range(44))
    assert sum(counts.values()) == 45  # the 32 that were left are not a multiple of 3
    assert "the 32 samples left of the epoch are dealt" in second[0].log


def test_the_batch_size_may_change_with_the_number_of_ranks(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    first = train(job, 2, until=15)
    second = train({**job, "batch": 4}, 1, seed=1)
    assert_each_once(first, second)


def test_a_sampler_of_the_users_for_ranks_that_share_an_order_too(tmp_path: Path) -> None:
    job = job_in(tmp_path, sampler="distributed")
    first = train(job, 2, until=15)
    assert said(first[1], "batch")[0]["ids"] == [1, 3]
    second = train(job, 1)
    assert said(second[0], "batch")[0]["ids"] == [12, 13]
    assert_each_once(first, second)


def test_batches_that_led_to_no_step_yet_are_read_again(tmp_path: Path) -> None:
    job = job_in(tmp_path, sigterm_after=[1, 4])
    accumulate = {"accumulate_grad_batches": 3}
    first = run_ranks(
        {**job, "trainer": {"max_epochs": EPOCHS, "strategy": "ddp", "devices": 2, **accumulate}}, 2
    )
    assert [rank.code for rank in first] == [143, 143], first[0].log
    kept = [Done(0, [one for one in said(rank, "batch") if not lost(one)], "") for rank in first]
    second = train({**job, "sigterm_after": None}, 1, trainer=accumulate)
    assert_each_once(kept, second)


def lost(batch: dict[str, Any]) -> bool:
    """Whether it came after the last step before the signal."""
    return batch["epoch"] == 1 and batch["index"] >= 3


def test_where_no_order_is_shared_the_epochs_data_begins_anew(tmp_path: Path) -> None:
    job = job_in(tmp_path, sampler="own")
    train(job, 1, until=24 + 6)
    second = train(job, 2)
    assert "the epoch's data begins anew, for it has no order that all ranks share" in second[0].log
    counts = seen(second)
    assert not counts[0]
    assert counts[1] == counts[2] == Counter(range(SAMPLES))
    assert [line["index"] for line in said(second[0], "batch")] == [*range(12), *range(12)]


def test_between_epochs_the_next_one_is_dealt_as_ever(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    first = train(job, 2, trainer={"max_epochs": 1})
    second = train(job, 1, seed=1)
    assert_each_once(first, second)


def test_other_data_is_an_error_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    train(job, 2, until=15)
    options = {"max_epochs": EPOCHS}
    (other,) = run_ranks({**job, "samples": 40, "trainer": options}, 1)
    assert other.code == 1
    assert "it had 48 samples, now it has 40" in other.log
    lenient = {**job, "samples": 40, "callback": {"strict": False}}
    second = train(lenient, 1)
    assert seen(second)[1] == Counter(range(40))


def test_the_same_ranks_shuffle_on_as_before_whatever_the_global_seed_is_now(
    tmp_path: Path,
) -> None:
    job = job_in(tmp_path)
    whole = train({**job, "root": str(tmp_path / "whole")}, 2)
    parts = [train(job, 2, until=15), train(job, 2, seed=1)]
    for rank in range(2):
        batches = [line for part in parts for line in said(part[rank], "batch")]
        assert batches == said(whole[rank], "batch")
