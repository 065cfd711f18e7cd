"""An interrupted and resumed Lightning run is, bit for bit, the run without interruption.

The reference is a stock run, without this package. The resumed run starts from another seed, so
whatever is not restored shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning.exact_job import Case, options
from tests.lightning.exact_run import check

MIDDLE, SECOND, LAST = ("batch_end", 3), ("batch_end", 11), ("batch_end", 16)
END, END2 = ("epoch_end", 1), ("epoch_end", 2)
VALIDATED = ("validation_end", 2)


CASES: dict[str, tuple[Case, list[tuple[str, int]]]] = {
    "plain": (
        Case(),
        [MIDDLE, SECOND, LAST, END, END2, ("batch_end", 1)],
    ),
    "workers": (Case(workers=2), [MIDDLE, SECOND, LAST, END]),
    "own generator": (Case(generator=True, validate=True), [SECOND, END, VALIDATED]),
    "weighted sampler": (Case(loader="weighted"), [SECOND]),
    "validation": (Case(validate=True), [SECOND, LAST, END, VALIDATED]),
    "validation in mid-epoch": (
        Case(validate=True, trainer=options(val_check_interval=4)),
        [("batch_end", 4), SECOND, LAST, VALIDATED, ("validation_end", 3), END],
    ),
    "validation cut short": (Case(validate=True), [("validation_batch_end", 3)]),
    "accumulation": (
        Case(trainer=options(accumulate_grad_batches=3)),
        [("batch_end", 3), ("batch_end", 4), ("batch_end", 10), LAST],
    ),
    "manual optimization": (Case(manual=True), [("batch_end", 3), ("batch_end", 13), LAST]),
    "limit_train_batches": (
        Case(trainer=options(limit_train_batches=5)),
        [MIDDLE, ("batch_end", 10)],
    ),
    "max_steps": (
        Case(validate=True, trainer=options(max_steps=20, max_epochs=-1)),
        [("batch_end", 8), SECOND, END, VALIDATED],
    ),
    "estimated_stepping_batches": (Case(estimate=True), [MIDDLE, SECOND, END]),
    "plateau of an epoch mean": (Case(plateau="loss_epoch"), [SECOND, LAST, END]),
    "plateau of validation": (
        Case(plateau="val_loss", validate=True),
        [SECOND, LAST, END, VALIDATED],
    ),
    "plateau at each step": (
        Case(plateau="loss_step", plateau_interval="step"),
        [MIDDLE, ("batch_end", 8), SECOND],
    ),
    "loaders made anew each epoch": (
        Case(loaders_in_module=True, trainer=options(reload_dataloaders_every_n_epochs=1)),
        [MIDDLE, SECOND, LAST, END],
    ),
    "loaders made anew every other epoch": (
        Case(
            loaders_in_module=True,
            validate=True,
            trainer=options(reload_dataloaders_every_n_epochs=2, max_epochs=5),
        ),
        [SECOND, ("batch_end", 20), END, END2],
    ),
    "stream": (Case(loader="stream"), [MIDDLE, SECOND, LAST, END]),
    "stream with workers": (Case(loader="stream", workers=2), [SECOND]),
    "loaders that cycle": (
        Case(loader="combined:max_size_cycle"),
        [("batch_end", 4), ("batch_end", 13), ("batch_end", 15), END],
    ),
    "loaders that cycle, workers": (
        Case(loader="combined:max_size_cycle", workers=1, trainer=options(max_epochs=2)),
        [("batch_end", 14)],
    ),
    "loaders, the longest": (Case(loader="combined:max_size"), [MIDDLE, ("batch_end", 13)]),
    "loaders, the shortest": (
        Case(loader="combined:min_size"),
        [("batch_end", 3), ("batch_end", 4)],
    ),
    "persistent workers": (
        Case(workers=1, persistent=True, augment=False, validate=True),
        [MIDDLE, SECOND, END],
    ),
    "stateful": (Case(loader="stateful"), [MIDDLE, SECOND, LAST, END, END2]),
    "stateful, workers": (Case(loader="stateful", workers=2), [SECOND]),
    "stateful, estimated": (Case(loader="stateful", estimate=True), [SECOND]),
    "exception": (Case(), [("exception", 4), ("exception", 9), ("exception", 1)]),
    "sigterm": (Case(validate=True), [("sigterm", 4), ("sigterm", 11), ("sigterm", 8)]),
    "before an epoch": (Case(), [("epoch_start", 2)]),
    "early stopping": (
        Case(validate=True, stop_early=True, trainer=options(max_epochs=6)),
        [SECOND, ("validation_end", 1), VALIDATED],
    ),
    "a step that fetches": (Case(step_fetches=True), [MIDDLE, SECOND, END]),
    "older package": (
        Case(package="pytorch_lightning", validate=True, trainer=options(val_check_interval=4)),
        [("batch_end", 4), SECOND, LAST, VALIDATED, END],
    ),
    "older package, loaders that cycle": (
        Case(package="pytorch_lightning", loader="combined:max_size_cycle"),
        [SECOND],
    ),
}


@pytest.mark.parametrize(
    ("case", "save"),
    [
        pytest.param(case, save, id=f"{name}-{save[0]}-{save[1]}")
        for name, (case, saves) in CASES.items()
        for save in saves
    ],
)
def test_resumed_run_is_the_uninterrupted_run(
    case: Case, save: tuple[str, int], tmp_path: Path
) -> None:
    check(case, save, tmp_path)
