"""Which generations wait for the archive, in which order, and what holds one up."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests import samples
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.retention import KeepLast
from torch_ckpt.writer.ledger import Id, Ledger


def unread(one: Generation) -> Collection[Id]:
    pytest.fail(f"the parts of {one.folder} were read")


def one(step: int, attempt: str = "0123a000", **fields: object) -> Generation:
    return samples.generation(step, folder=f"step-{step}-{attempt}", attempt=attempt, **fields)


def steps(found: list[Generation]) -> list[int]:
    return [generation.step for generation in found]


def test_the_newest_comes_first_after_what_it_builds_on() -> None:
    ledger = Ledger(None, unread)
    ledger.adopt([one(1), one(2, bases=(1,)), one(3), one(4, tags={"damaged": ""})])
    ledger.learn(one(5, bases=(1, 2)))
    assert steps(ledger.waiting()) == [1, 2, 5, 3]
    ledger.over(one(3), archived=True)
    ledger.over(one(2, bases=(1,)), archived=False)
    assert steps(ledger.waiting()) == [1, 5]


def test_what_the_rule_drops_waits_for_nothing_and_may_leave_the_root() -> None:
    ledger = Ledger(KeepLast(1), unread)
    ledger.adopt([one(1), one(2)])
    assert (steps(ledger.waiting()), steps(ledger.dropped())) == ([2], [1])
    assert ledger.pinned(one(1)) is None
    assert ledger.pinned(one(2)) == "the archive does not have it yet"
    ledger.over(one(2), archived=True)
    assert ledger.pinned(one(2)) is None
    ledger.hold(one(2))
    assert ledger.pinned(one(2)) == "the next save may build on it"


def test_what_was_given_up_goes_once_it_is_archived_and_only_then() -> None:
    ledger = Ledger(None, unread)
    for step in (1, 2):
        ledger.learn(one(step))
        ledger.give_up(one(step))
    assert not ledger.over(one(1), archived=False)
    assert ledger.over(one(2), archived=True)
    assert not ledger.over(one(2), archived=True)


def test_what_has_the_folder_of_one_that_was_given_up_is_not_given_up() -> None:
    first, second = (
        samples.generation(step, folder="last.ckpt", attempt=f"0123a00{step}") for step in (1, 2)
    )
    ledger = Ledger(None, unread)
    ledger.learn(first)
    ledger.give_up(first)
    ledger.learn(second)
    ledger.over(first, archived=False)  # it was overwritten before it was promoted
    assert not ledger.over(second, archived=True)


def test_a_base_of_another_attempt_is_neither_there_nor_lost() -> None:
    base, other, child = one(1, "0123a001"), one(1, "0123a002"), one(2, bases=(1,))
    read: list[Generation] = []

    def builds_on(generation: Generation) -> Collection[Id]:
        read.append(generation)
        return {base.id}

    ledger = Ledger(None, builds_on)
    ledger.adopt([base, other, child])
    ledger.over(other, archived=True)
    assert not ledger.has_bases(child)
    ledger.over(base, archived=True)
    assert ledger.has_bases(child)
    assert read == [child]  # once

    ledger = Ledger(None, builds_on)
    ledger.adopt([base, one(1, "0123a002", tags={"damaged": ""}), child])
    assert ledger.lost_base(child) is None
    ledger.over(base, archived=False)
    assert ledger.lost_base(child) == 1


def test_no_part_is_read_while_each_step_was_saved_once() -> None:
    ledger, child = Ledger(None, unread), one(3, bases=(1, 2))
    ledger.adopt([one(1), one(2, bases=(1,)), child])
    assert ledger.lends(one(1))
    assert not ledger.has_bases(child)
    ledger.over(one(1), archived=True)
    ledger.over(one(2, bases=(1,)), archived=False)
    assert ledger.lost_base(child) == 2
    assert not ledger.has_bases(child)


def test_a_long_run_forgets_what_is_over_and_nothing_that_waits() -> None:
    ledger = Ledger(None, unread)
    for step in range(400):
        ledger.learn(one(step))
        if step:
            ledger.over(one(step), archived=True)
    ledger.forget()
    assert steps(ledger.waiting()) == [0]
    assert len(ledger.known()) == 257
    assert ledger.is_archived(one(1).id)
