"""The order in which generations are tried is the same on every rank and asks no clock."""

from __future__ import annotations

import random
from typing import Any

from tests.samples import generation
from torch_ckpt.generations.choose import choose


def parent(step: int, attempt: str) -> dict[str, Any]:
    return {"step": step, "attempt": attempt * 8}


def folders(generations: list[Any], step: int | None = None) -> list[str]:
    orders = set()
    for seed in range(5):
        random.Random(seed).shuffle(generations)
        orders.add(tuple(one.folder for one in choose(generations, step)))
    assert len(orders) == 1  # whatever order storage lists them in
    return list(orders.pop())


def test_newest_first() -> None:
    assert folders([generation(1, "a"), generation(3, "b"), generation(2, "c")]) == ["b", "c", "a"]
    assert choose([]) == []


def test_what_is_set_apart_is_never_chosen_by_itself() -> None:
    there = [
        generation(9, "i", tags={"damaged": ""}),
        generation(8, "h", tags={"aside": ""}),
        generation(7, "g", tags={"suspect": "", "permanent": ""}),
    ]
    assert folders(there) == ["g"]


def test_a_step_that_is_asked_for_is_the_only_one_tried() -> None:
    there = [
        generation(5, "a", tags={"aside": ""}),
        generation(5, "b"),
        generation(4, "c"),
    ]
    assert folders(there, 5) == ["b", "a"]
    assert folders(there, 6) == []


def test_of_two_at_one_step_the_ancestor_of_the_newest_comes_first() -> None:
    there = [
        generation(500, "z", attempt="1" * 8),
        generation(500, "a", attempt="2" * 8),
        generation(600, "b", attempt="3" * 8, parent=parent(500, "1")),
    ]
    assert folders(there) == ["b", "z", "a"]


def test_a_line_is_followed_across_deleted_generations_only_as_far_as_it_is_known() -> None:
    there = [
        generation(700, "c", attempt="4" * 8, parent=parent(600, "9")),
        generation(500, "z", attempt="1" * 8),
        generation(500, "a", attempt="2" * 8),
    ]
    assert folders(there) == ["c", "a", "z"]


def test_planted_circles_end() -> None:
    there = [
        generation(2, "b", attempt="2" * 8, parent=parent(1, "1")),
        generation(1, "a", attempt="1" * 8, parent=parent(2, "2")),
    ]
    assert folders(there) == ["b", "a"]
