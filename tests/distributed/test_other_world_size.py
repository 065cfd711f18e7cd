"""What belongs to one rank is derived anew, or left alone and named, where their number changed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.distributed.ranks import run_ranks
from torch_ckpt import Checkpointer, PerRank, RngState


class Lines:
    """Reads every n-th line of a file; what is left is divided among any number of ranks."""

    def __init__(self, left: list[int]) -> None:
        self.left = torch.tensor(left)

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], rank: int, world_size: int
    ) -> dict[str, Any]:
        left = torch.cat([state["left"] for state in states]).sort().values
        return {"left": left[rank::world_size]}


class Heard(logging.Handler):
    """Keeps what was said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def state_of(left: list[int], own: int) -> dict[str, Any]:
    return {
        "weights": torch.full((4,), float(own)),
        "data": PerRank({"lines": Lines(left), "note": own}),
        "rng": PerRank(RngState()),
        "own": PerRank({"t": torch.full((2,), float(own)), "n": own}),
    }


def save(rank: int, root: str) -> None:
    torch.manual_seed(10 + rank)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(state_of([rank, rank + 2, rank + 4], rank), 5)


def resume(rank: int, root: str) -> dict[str, Any]:
    heard = Heard()
    logging.getLogger("torch_ckpt").addHandler(heard)
    torch.manual_seed(99)
    state = state_of([-1], 70 + rank)
    with Checkpointer(root) as checkpointer:
        checkpointer.resume(state)
    return {
        "weights": state["weights"].tolist(),
        "left": state["data"].value["lines"].left.tolist(),
        "note": state["data"].value["note"],
        "own": [state["own"].value["n"], state["own"].value["t"].tolist()],
        "drawn": torch.rand(2).tolist(),
        "said": [line for line in heard.lines if "rank(s)" in line],
    }


def test_three_ranks_continue_what_two_had_saved(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    assert run_ranks(tmp_path / "save", save, 2, root) == [None, None]
    first = run_ranks(tmp_path / "first", resume, 3, root)
    assert [rank["left"] for rank in first] == [[0, 3], [1, 4], [2, 5]]
    assert [rank["weights"] for rank in first] == [[0.0] * 4] * 3
    assert [rank["note"] for rank in first] == [70, 71, 72]
    assert [rank["own"] for rank in first] == [[n, [float(n)] * 2] for n in (70, 71, 72)]
    assert len({tuple(rank["drawn"]) for rank in first}) == 3
    assert [len(rank["said"]) for rank in first] == [1, 0, 0]
    (said,) = first[0]["said"]
    assert "saved by 2 rank(s) and is loaded by 3" in said
    assert "derived anew from what all ranks had: data.lines, rng" in said
    assert "reshard_state_dict: data.note, own" in said
    again = run_ranks(tmp_path / "again", resume, 3, root)
    assert [rank["drawn"] for rank in again] == [rank["drawn"] for rank in first]


def test_one_rank_continues_what_two_had_saved_and_two_get_their_own_back(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    assert run_ranks(tmp_path / "save", save, 2, root) == [None, None]
    (alone,) = run_ranks(tmp_path / "alone", resume, 1, root)
    assert alone["left"] == [0, 1, 2, 3, 4, 5]
    same = run_ranks(tmp_path / "same", resume, 2, root)
    assert [rank["left"] for rank in same] == [[0, 2, 4], [1, 3, 5]]
    assert [rank["own"] for rank in same] == [[0, [0.0, 0.0]], [1, [1.0, 1.0]]]
    assert [rank["said"] for rank in same] == [[], []]
