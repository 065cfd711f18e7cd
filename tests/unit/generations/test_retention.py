"""Retention: which generations stay, and the reason a person reads."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.samples import generation
from torch_ckpt.errors import ConfigError
from torch_ckpt.generations.retention import (
    AnyOf,
    KeepBest,
    KeepEvery,
    KeepLast,
    Retention,
    from_json,
    parse_rule,
    to_json,
)


def kept(rule: Retention, *generations: Any) -> list[str]:
    return [v.generation.folder for v in rule.judge(generations) if v.kept]


def steps(rule: Retention, *numbers: int) -> list[int]:
    found = [v for v in rule.judge([generation(n) for n in numbers]) if v.kept]
    return [v.generation.step for v in found]


def losses(**values: float) -> list[Any]:
    return [generation(int(step[1:]), metrics={"loss": value}) for step, value in values.items()]


def test_keep_last_keeps_the_newest_steps() -> None:
    assert steps(KeepLast(2), 1, 3, 2) == [3, 2]
    assert steps(KeepLast(5), 1) == [1]
    assert steps(KeepLast(5)) == []


def test_two_names_of_one_step_count_once_and_stay_together() -> None:
    twins = [generation(5, "a"), generation(5, "b"), generation(4, "c"), generation(3, "d")]
    assert kept(KeepLast(2), *twins) == ["a", "b", "c"]


def test_keep_every_keeps_multiples_and_the_newest() -> None:
    assert steps(KeepEvery(100), 0, 50, 100, 150, 200, 250) == [250, 200, 100, 0]


def test_keep_best_ranks_and_prefers_the_newer_of_equals() -> None:
    runs = losses(s1=0.5, s2=0.1, s3=0.3, s4=0.1, s5=0.9)
    rule = KeepBest("loss", 2)
    assert [v.generation.step for v in rule.judge(runs) if v.kept] == [5, 4, 2]
    most = KeepBest("loss", 1, "max").judge(runs)
    assert [(v.generation.step, v.reason) for v in most if v.kept] == [
        (5, "the best by loss (0.9)")
    ]


def test_keep_best_ignores_what_has_no_number() -> None:
    runs = [*losses(s1=math.nan, s2=0.4, s4=math.nan), generation(3)]
    assert [v.generation.step for v in KeepBest("loss").judge(runs) if v.kept] == [4, 2]
    assert steps(KeepBest("loss"), 1, 2) == [2]


def test_any_of_gives_every_reason() -> None:
    rule = KeepLast(1) | KeepEvery(5) | KeepBest("loss")
    assert isinstance(rule, AnyOf)
    assert len(rule.rules) == 3
    verdicts = rule.judge([generation(10), generation(5), generation(3)])
    assert [(v.kept, v.reason) for v in verdicts] == [
        (True, "the newest and a multiple of 5"),
        (True, "a multiple of 5"),
        (False, "no rule keeps it"),
    ]


def test_permanent_stays_and_says_why() -> None:
    verdicts = KeepLast(1).judge([generation(2), generation(1, tags={"permanent": "paper"})])
    assert verdicts[1].kept
    assert verdicts[1].reason == "permanent: paper"


def test_what_is_set_apart_stays_but_counts_for_nothing() -> None:
    runs = [
        generation(9, tags={"damaged": "bit rot"}, metrics={"loss": 0.0}),
        generation(8, tags={"aside": "went back to 5"}, metrics={"loss": 0.1}),
        generation(5, metrics={"loss": 0.5}),
        generation(4, metrics={"loss": 0.4}),
        generation(3),
    ]
    verdicts = (KeepLast(1) | KeepBest("loss")).judge(runs)
    assert [(v.generation.step, v.kept) for v in verdicts] == [
        (9, True),
        (8, True),
        (5, True),
        (4, True),
        (3, False),
    ]
    assert verdicts[0].reason == "quarantined: bit rot"
    assert verdicts[1].reason == "set aside: went back to 5"


@pytest.mark.parametrize(
    "build",
    [
        lambda: KeepLast(0),
        lambda: KeepLast(True),
        lambda: KeepLast(1.5),  # pyright: ignore[reportArgumentType]
        lambda: KeepEvery(-1),
        lambda: KeepBest(""),
        lambda: KeepBest("loss", 0),
        lambda: KeepBest("loss", mode="low"),  # pyright: ignore[reportArgumentType]
        lambda: AnyOf(()),
        lambda: KeepLast(1) | 3,  # pyright: ignore[reportOperatorIssue]
        lambda: from_json({}),
        lambda: from_json({"last": 1, "every": 2}),
        lambda: from_json({"best": {"metric": "a", "k": 1}}),
        lambda: from_json({"any": 3}),
        lambda: from_json([]),  # pyright: ignore[reportArgumentType]
        lambda: parse_rule(""),
        lambda: parse_rule("last"),
        lambda: parse_rule("last=x"),
        lambda: parse_rule("newest=3"),
        lambda: parse_rule("best=loss:2:low"),
    ],
)
def test_rules_that_mean_nothing_are_refused_at_once(build: Any) -> None:
    with pytest.raises(ConfigError):
        build()


def test_the_command_line_speaks_rules() -> None:
    assert parse_rule("last=3") == KeepLast(3)
    assert parse_rule("last=3, every=1000, best=val_loss:2:max") == (
        KeepLast(3) | KeepEvery(1000) | KeepBest("val_loss", 2, "max")
    )
    assert parse_rule("best=loss") == KeepBest("loss")
    assert parse_rule("best=loss:4") == KeepBest("loss", 4)


RULES = st.recursive(
    st.one_of(
        st.builds(KeepLast, st.integers(1, 4)),
        st.builds(KeepEvery, st.integers(1, 4)),
        st.builds(KeepBest, st.just("loss"), st.integers(1, 3), st.sampled_from(["min", "max"])),
    ),
    lambda rules: st.builds(lambda a, b: a | b, rules, rules),
    max_leaves=4,
)
GENERATIONS = st.lists(
    st.builds(
        lambda step, n, tags, loss: generation(
            step, f"{step}-{n}", tags=dict.fromkeys(tags, ""), metrics={"loss": loss}
        ),
        st.integers(0, 12),
        st.integers(0, 2),
        st.sets(st.sampled_from(["permanent", "aside", "damaged", "suspect"]), max_size=2),
        st.floats(),
    ),
    unique_by=lambda one: one.folder,
    max_size=12,
)


@given(RULES, GENERATIONS)
def test_whatever_the_rule_the_newest_usable_one_stays(rule: Retention, runs: list[Any]) -> None:
    verdicts = rule.judge(runs)
    assert sorted(v.generation.folder for v in verdicts) == sorted(one.folder for one in runs)
    assert all(v.reason for v in verdicts)
    usable = [v for v in verdicts if not v.generation.set_apart]
    assert not usable or usable[0].kept
    assert from_json(to_json(rule)) == rule


@given(RULES, GENERATIONS)
def test_judging_what_was_kept_drops_nothing_more(rule: Retention, runs: list[Any]) -> None:
    left = [v.generation for v in rule.judge(runs) if v.kept]
    assert all(v.kept for v in rule.judge(left))
