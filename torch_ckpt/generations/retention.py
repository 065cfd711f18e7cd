"""Which generations stay, and why, in words for a person. Pure: decides, and deletes nothing.

Rules count steps, not names: two generations of one step are one snapshot under two names, so
they stay or go together. Knows manifests. Knows nothing of stores.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch_ckpt.errors import ConfigError
from torch_ckpt.generations.catalog import SET_APART, Generation, newest_first


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether one generation stays, and why."""

    generation: Generation
    kept: bool
    reason: str


class Retention(ABC):
    """A rule that says which generations stay; rules combine with `|`."""

    @abstractmethod
    def reasons(self, usable: Sequence[Generation]) -> dict[int, str]:
        """The steps to keep among `usable` (newest first), each with its reason."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The rule as `from_json` reads it."""

    def __or__(self, other: Retention) -> AnyOf:
        """Keep what either rule keeps."""
        return AnyOf(_flat(self) + _flat(other))

    def judge(self, generations: Sequence[Generation]) -> list[Verdict]:
        """A verdict on every generation, newest first.

        The newest one that can be used always stays, so does whatever is `permanent`. What is
        damaged or set aside stays until a person removes it, and counts for no rule.
        """
        ordered = sorted(generations, key=newest_first)
        usable = [one for one in ordered if not one.set_apart]
        reasons = self.reasons(usable)
        if usable:
            reasons.setdefault(usable[0].step, "the newest")
        return [_verdict(one, reasons) for one in ordered]


@dataclass(frozen=True, slots=True)
class KeepLast(Retention):
    """Keep the newest `n` steps."""

    n: int
    """Steps to keep; two names of one step count once."""

    def __post_init__(self) -> None:
        _require_whole("KeepLast.n", self.n)

    def reasons(self, usable: Sequence[Generation]) -> dict[int, str]:
        reason = "the newest" if self.n == 1 else f"one of the newest {self.n}"
        return dict.fromkeys(_first_steps(usable, self.n), reason)

    def to_json(self) -> dict[str, Any]:
        return {"last": self.n}


@dataclass(frozen=True, slots=True)
class KeepEvery(Retention):
    """Keep each step that is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _require_whole("KeepEvery.steps", self.steps)

    def reasons(self, usable: Sequence[Generation]) -> dict[int, str]:
        reason = f"a multiple of {self.steps}"
        return {one.step: reason for one in usable if one.step % self.steps == 0}

    def to_json(self) -> dict[str, Any]:
        return {"every": self.steps}


@dataclass(frozen=True, slots=True)
class KeepBest(Retention):
    """Keep the `n` steps with the best value of a metric; of equal ones, the newer."""

    metric: str
    """As given to `save(metrics=...)`; generations without it, or with nan, do not compete."""
    n: int = 1
    mode: Literal["min", "max"] = "min"
    """Whether a low or a high value is good."""

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f"KeepBest.metric must name a metric, got {self.metric!r}")
        _require_whole("KeepBest.n", self.n)
        if self.mode not in {"min", "max"}:
            raise ConfigError(f"KeepBest.mode must be 'min' or 'max', got {self.mode!r}")

    def reasons(self, usable: Sequence[Generation]) -> dict[int, str]:
        sign = 1.0 if self.mode == "min" else -1.0
        ranked = sorted(
            (sign * value, -one.step)
            for one in usable
            if not math.isnan(value := one.manifest.metrics.get(self.metric, math.nan))
        )
        best: dict[int, str] = {}
        for value, negative_step in ranked:
            if len(best) == self.n and -negative_step not in best:
                break
            place = "the best" if not best else f"number {len(best) + 1}"
            best.setdefault(-negative_step, f"{place} by {self.metric} ({sign * value:g})")
        return best

    def to_json(self) -> dict[str, Any]:
        return {"best": {"metric": self.metric, "n": self.n, "mode": self.mode}}


@dataclass(frozen=True, slots=True)
class AnyOf(Retention):
    """Keep what at least one of the rules keeps."""

    rules: tuple[Retention, ...]

    def __post_init__(self) -> None:
        if not self.rules or not all(isinstance(rule, Retention) for rule in self.rules):
            raise ConfigError(f"AnyOf needs at least one rule and nothing else, got {self.rules}")

    def reasons(self, usable: Sequence[Generation]) -> dict[int, str]:
        found: dict[int, list[str]] = {}
        for rule in self.rules:
            for step, reason in rule.reasons(usable).items():
                found.setdefault(step, []).append(reason)
        return {step: " and ".join(reasons) for step, reasons in found.items()}

    def to_json(self) -> dict[str, Any]:
        return {"any": [rule.to_json() for rule in self.rules]}


@dataclass(frozen=True, slots=True)
class Among(Retention):
    """A rule asked about more generations than those it is carried out on.

    For an archive, whose rule counts what has yet to arrive there.
    """

    rule: Retention
    others: tuple[Generation, ...]
    """Generations elsewhere that count too."""

    def reasons(self, usable: Sequence[Generation]) -> dict[int, str]:
        known = {one.id for one in usable}
        others = [one for one in self.others if one.id not in known and not one.set_apart]
        return self.rule.reasons(sorted([*usable, *others], key=newest_first))

    def to_json(self) -> dict[str, Any]:
        return self.rule.to_json()


def multiples(rule: Retention | None) -> tuple[int, ...]:
    """The numbers whose multiples a rule keeps for ever, whatever else it keeps."""
    rules = rule.rules if isinstance(rule, AnyOf) else (rule,)
    return tuple(one.steps for one in rules if isinstance(one, KeepEvery))


def to_json(rule: Retention) -> dict[str, Any]:
    """The rule as JSON, for the writer."""
    return rule.to_json()


def from_json(doc: Mapping[str, Any]) -> Retention:
    """The rule that `to_json` wrote.

    Raises:
        ConfigError: it is not one.
    """
    builders: dict[str, Callable[[Any], Retention]] = {
        "last": KeepLast,
        "every": KeepEvery,
        "best": lambda fields: KeepBest(**fields),
        "any": lambda rules: AnyOf(tuple(map(from_json, rules))),
    }
    try:
        ((kind, value),) = doc.items()
        return builders[kind](value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{doc!r} is not a retention rule") from error


def parse_rule(text: str) -> Retention:
    """The rule in words such as `last=3,every=1000,best=val_loss:2:min`: any of them keeps.

    Raises:
        ConfigError: it is not one.
    """
    try:
        rules = tuple(_parse_one(*clause.split("=", 1)) for clause in text.split(","))
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{text!r} is not a retention rule; "
            "write for example last=3,every=1000,best=val_loss:2:min"
        ) from error
    return rules[0] if len(rules) == 1 else AnyOf(rules)


def _parse_one(kind: str, value: str) -> Retention:
    kind = kind.strip()
    if kind == "last":
        return KeepLast(int(value))
    if kind == "every":
        return KeepEvery(int(value))
    if kind == "best":
        metric, *rest = value.strip().rsplit(
            ":", 2
        )  # a metric may hold colons if all three are given
        n = int(rest[0]) if rest else 1
        mode: Any = rest[1].strip() if len(rest) == 2 else "min"
        return KeepBest(metric, n, mode)
    raise ConfigError(f"{kind!r} is no retention rule; there are last, every and best")


def _verdict(one: Generation, reasons: Mapping[int, str]) -> Verdict:
    why = [
        f"{word}: {one.tags[tag]}" if one.tags[tag] else word
        for tag, word in {**SET_APART, "permanent": "permanent"}.items()
        if tag in one.tags
    ]
    if not one.set_apart and one.step in reasons:
        why.append(reasons[one.step])
    return Verdict(generation=one, kept=bool(why), reason=" and ".join(why) or "no rule keeps it")


def _first_steps(usable: Sequence[Generation], n: int) -> list[int]:
    return list(dict.fromkeys(one.step for one in usable))[:n]


def _flat(rule: Retention) -> tuple[Retention, ...]:
    if not isinstance(rule, Retention):
        raise ConfigError(f"{rule!r} is not a retention rule")
    return rule.rules if isinstance(rule, AnyOf) else (rule,)


def _require_whole(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} must be a whole number from 1 up, got {value!r}")
