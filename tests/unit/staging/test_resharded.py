"""What a rank gets of the values of another number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from torch_ckpt import PerRank, StateMismatch
from torch_ckpt.staging.objects import Json
from torch_ckpt.staging.resharded import Resize, Source


class Position:
    """A count of samples that ranks have between them."""

    def __init__(self, seen: int = -1) -> None:
        self.seen = seen

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def reshard_state_dict(
        self, states: Sequence[dict[str, int]], rank: int, world_size: int
    ) -> dict[str, int]:
        return {"seen": sum(state["seen"] for state in states) // world_size + 100 * rank}


class Plain:
    """Reads documents that hold nothing but plain values."""

    allow_pickle = False

    def leaf(self, tag: str, document: dict[str, Json]) -> object:
        raise NotImplementedError(tag)

    def blob(self, name: str) -> np.ndarray[Any, Any]:
        raise NotImplementedError(name)


def source(wanted: list[Json]) -> Source:
    def items(document: Json) -> list[tuple[Any, Json]] | None:
        return list(document.items()) if isinstance(document, dict) else None

    return Source(Plain(), wanted.append, items)


SAVED: list[dict[str, Json]] = [{"a": {"seen": 2}}, {"a": {"seen": 4}}]


def test_an_object_gets_what_it_makes_of_the_states_of_all_ranks() -> None:
    wanted: list[Json] = []
    position = PerRank(Position())
    bound = Resize(SAVED, rank=1, world_size=3).bind("a", position, "a", source(wanted))
    assert position.value.seen == -1  # binding changes nothing
    assert wanted == [{"seen": 2}, {"seen": 4}]
    assert bound.value() is position
    assert position.value.seen == 102


def test_objects_in_a_dict_get_theirs_and_what_else_is_in_it_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved: list[dict[str, Json]] = [{"a": {"at": own["a"], "note": "saved"}} for own in SAVED]
    value = PerRank({"at": Position(), "note": "here"})
    resize = Resize(saved, rank=0, world_size=1)
    assert resize.bind("a", value, "data", source([])).value() is value
    assert value.value["at"].seen == 6
    assert value.value["note"] == "here"
    resize.tell("runs/7")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "saved by 2 rank(s) and is loaded by 1" in record.getMessage()
    assert "what all ranks had: data.at" in record.getMessage()
    assert "for want of a reshard_state_dict: data.note" in record.getMessage()


@pytest.mark.parametrize("saved", [[{"a": 1}, {"a": 2}], [{"a": {"seen": 2}}, {}]])
def test_what_cannot_be_divided_stays_as_it_is(saved: list[dict[str, Json]]) -> None:
    for live in (PerRank(5), PerRank(Position(5)) if saved[1] == {} else PerRank({"n": 5})):
        resize = Resize(saved, rank=0, world_size=1)
        assert resize.bind("a", live, "a", source([])).value() is live
        kept = live.value.seen if isinstance(live.value, Position) else live.value
        assert kept in (5, {"n": 5})


def test_only_rank_0_says_so_and_only_if_there_is_something(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for rank, value in ((1, 5), (0, None)):
        resize = Resize(SAVED, rank=rank, world_size=3)
        if value is not None:
            resize.bind("a", PerRank(value), "a", source([]))
        resize.tell("runs/7")
    assert not caplog.records


def test_states_that_an_object_refuses_are_a_mismatch_that_names_it() -> None:
    saved: list[dict[str, Json]] = [{"a": {"other": 2}}]
    bound = Resize(saved, rank=0, world_size=2).bind("a", Position(), "data.a", source([]))
    with pytest.raises(StateMismatch, match=r"(?s)data\.a.*Position, for another number of ranks"):
        bound.value()
