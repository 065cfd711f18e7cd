"""What exact resume leaves to its user: how to skip, what to refuse, where to save."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ckpt.exact import ExactResume, NotExact
from lightning_ckpt.passing import may_leave_unread
from tests.lightning.exact_job import BATCH, Case, Noisy, options
from tests.lightning.exact_run import (
    Exact,
    LateExact,
    LateSetup,
    Resized,
    check,
    train,
    uninterrupted,
)
from torch_ckpt import ConfigError

MIDDLE, SECOND = ("batch_end", 3), ("batch_end", 11)


def test_state_that_comes_after_the_loaders_were_made(tmp_path: Path) -> None:
    check(Case(), MIDDLE, tmp_path, exact=LateExact)
    check(Case(estimate=True), SECOND, tmp_path, exact=LateExact)


@pytest.mark.parametrize("save", [MIDDLE, SECOND])
def test_loaders_made_before_the_watch_began(save: tuple[str, int], tmp_path: Path) -> None:
    case, path = Case(estimate=True, workers=1), tmp_path / "saved.ckpt"
    whole = train(case, tmp_path, callback=LateSetup(path, None, ExactResume()))
    before = train(case, tmp_path, callback=LateSetup(path, save, ExactResume()))
    again = LateSetup(path, None, ExactResume())
    after = train(case, tmp_path, seed=77, callback=again, resume=path)
    assert before.lines + after.lines == whole.lines
    assert after.weights == whole.weights


def test_a_resumed_run_is_resumed_again_in_the_same_epoch(tmp_path: Path) -> None:
    case, path = Case(loader="combined:max_size_cycle"), tmp_path / "saved.ckpt"
    saves = [("batch_end", 11), ("batch_end", 2), ("batch_end", 2), None]
    results = [
        train(
            case,
            tmp_path,
            seed=seed or 5,
            callback=Exact(path, save, ExactResume()),
            resume=path if seed else None,
        )
        for seed, save in enumerate(saves)
    ]
    whole = uninterrupted(case)
    assert sum((result.lines for result in results), ()) == whole.lines
    assert results[-1].weights == whole.weights
    assert results[-1].generators == whole.generators


@pytest.mark.parametrize("save", [MIDDLE, SECOND])
@pytest.mark.parametrize("workers", [0, 1])
def test_fast_skip_is_exact_where_reading_draws_nothing(
    save: tuple[str, int], workers: int, tmp_path: Path
) -> None:
    case = Case(augment=False, workers=workers)
    uninterrupted(case)
    Noisy.reads = 0
    check(case, save, tmp_path, skip="fast")
    if workers == 0:
        assert Noisy.reads == (save[1] + (24 - save[1])) * BATCH  # each sample once, in both runs


def test_fast_skip_is_exact_without_workers_even_if_reading_draws(tmp_path: Path) -> None:
    check(Case(), SECOND, tmp_path, skip="fast")


@pytest.mark.parametrize("workers", [0, 1])
def test_tensor_datasets_are_not_read_again(workers: int, tmp_path: Path) -> None:
    loader = Case(loader="tensors", workers=workers).train_loader()
    assert may_leave_unread(loader, "exact")
    assert not may_leave_unread(Case(workers=workers).train_loader(), "exact")
    for save in (MIDDLE, SECOND):
        check(Case(loader="tensors", workers=workers), save, tmp_path)


def test_another_number_of_ranks_is_seeded_the_same_way_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "saved.ckpt"
    train(Case(), tmp_path, callback=Exact(path, SECOND, ExactResume()))
    results = [
        train(
            Case(),
            tmp_path,
            seed=seed,
            callback=Resized(path, None, ExactResume()),
            resume=path,
        )
        for seed in (1, 2)
    ]
    assert results[0] == results[1]
    assert "Saved with world size 2, resumed with 1" in caplog.text


ONE_EPOCH: dict[str, Any] = {"max_epochs": 1}


@pytest.mark.parametrize(
    ("case", "save", "lines"),
    [
        (Case(step_fetches=True, workers=1, trainer=options(**ONE_EPOCH)), 5, (3, 0)),
        (Case(validate=True, trainer=options(val_check_interval=0.5, **ONE_EPOCH)), 4, (4, 4)),
        (Case(validate=True, trainer=options(val_check_interval=0.5, **ONE_EPOCH)), 5, (3, 2)),
        (Case(validate=True, trainer=options(**ONE_EPOCH)), 8, (0, 2)),
        (Case(manual=True, trainer=options(**ONE_EPOCH)), 4, (4, 0)),
        (Case(trainer=options(limit_train_batches=5, **ONE_EPOCH)), 4, (1, 0)),
        (Case(loader="combined:max_size_cycle", trainer=options(**ONE_EPOCH)), 5, (8, 0)),
        (Case(loader="stream", trainer=options(**ONE_EPOCH)), 8, (0, 0)),
    ],
)
def test_on_another_number_of_ranks_an_epoch_has_its_batches_and_validations_and_ends_once(
    case: Case, save: int, lines: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "saved.ckpt"
    before = train(case, tmp_path, callback=Exact(path, ("batch_end", save), ExactResume()))
    after = train(case, tmp_path, callback=Resized(path, None, ExactResume()), resume=path)
    heads = [ast.literal_eval(line.replace("nan", "0"))[0] for line in after.lines]
    assert (heads.count("train"), heads.count("val")) == lines
    assert heads.count("epoch") == 1
    if "plain" in case.loader:
        limit = dict(case.trainer).get("limit_train_batches", 8)
        seen = [
            index
            for line in (*before.lines, *after.lines)
            if line.startswith("['train'")
            for index in ast.literal_eval(line.replace("nan", "0"))[3][0]
        ]
        assert len(seen) == len(set(seen)) == limit * BATCH


def test_other_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    train(Case(), tmp_path, callback=Exact(path, MIDDLE, ExactResume()))
    other = Case(loader="combined:min_size")
    with pytest.raises(NotExact, match=r"loaders had \[8\] batches, now they have \[3, 8, 2\]"):
        train(other, tmp_path, callback=Exact(path, None, ExactResume()), resume=path)


def test_at_optimizer_step_tells_where_gradients_wait(tmp_path: Path) -> None:
    told: list[bool] = []

    class Asking(Exact):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            super().on_train_batch_end(trainer)
            told.append(self.exact.at_optimizer_step(trainer))

    case = Case(trainer=options(accumulate_grad_batches=3, max_epochs=1))
    train(case, tmp_path, callback=Asking(tmp_path / "x.ckpt", None, ExactResume()))
    assert told == [False, False, True, False, False, True, False, True]


def test_loops_are_left_as_they_were(tmp_path: Path) -> None:
    trainer = pl.Trainer(logger=False, enable_checkpointing=False)
    exact = ExactResume()
    exact.setup(trainer)
    assert "setup_data" in vars(trainer.fit_loop)
    exact.teardown(trainer)
    assert "setup_data" not in vars(trainer.fit_loop)
    assert "on_run_start" not in vars(trainer.fit_loop.epoch_loop)


def test_a_lightning_without_what_is_needed_is_refused_by_name() -> None:
    trainer = pl.Trainer(logger=False, enable_checkpointing=False)
    del trainer.fit_loop.epoch_loop._skip_next_val
    with pytest.raises(ConfigError, match=r"has no epoch\._skip_next_val"):
        ExactResume().setup(trainer)


def test_an_unknown_skip_is_refused() -> None:
    with pytest.raises(ConfigError, match="skip must be"):
        ExactResume(skip="quick")  # type: ignore[arg-type]
