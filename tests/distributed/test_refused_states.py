"""States that ranks cannot save together are refused by name on all of them, never half saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import refused_job as job
from tests.distributed.ranks import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks raised for each of the states."""
    folder = tmp_path_factory.mktemp("refused")
    results = run_ranks(folder / "ranks", job.refuse, 2, str(folder / "run"))
    for result in results:
        assert isinstance(result, dict), result
    return results


NAMES = {
    "partial": ["'sum'", "Partial"],
    "per rank": ["'mine.t'", "DTensor inside a PerRank"],
    "stages": ["only rank 0 has 'model.layers.0.weight'; only rank 1 has 'model.layers.1.weight'"],
    "a key more": ["only rank 1 has 'extra'"],
    "a PerRank more": ["only rank 1 has 'rng'"],
    "a dtype": ["'t' is int64[2] on rank 0 and int32[2] on rank 1"],
    "placements": ["'t' is", "on rank 0 and", "on rank 1"],
    "other order": ["another order"],
    "tied on one": ["only rank 0 has 'b'"],
    "holed": ["'holed'"],
    "alone": ["'t'", "24 elements", "distributed=None"],
}


@pytest.mark.parametrize("how", NAMES)
def test_what_ranks_cannot_save_together_is_refused_by_name_on_each(
    found: list[dict[str, Any]], how: str
) -> None:
    for one in found:
        kind, error, took_s = one[how]
        assert kind in ("UnsupportedState", "DisagreementError"), (kind, error)
        for text in NAMES[how]:
            assert text in error
        assert took_s < 60


def test_a_state_may_change_its_shape_between_saves(tmp_path: Path) -> None:
    assert run_ranks(tmp_path / "ranks", job.change, 2, str(tmp_path / "run")) == [[]] * 2
