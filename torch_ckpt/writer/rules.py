"""Which codec is for which tensor: patterns over names, the first that fits decides.

What loses anything is only ever for tensors that a rule names. Knows names and codecs. Knows
nothing of blocks or saves.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_ckpt.codecs.codec import Codec
from torch_ckpt.codecs.names import codec_named
from torch_ckpt.errors import ConfigError

LOSSLESS = ("raw", "zstd", "auto")
LOSSY = ("fp8", "fp8-sqrt", "lossy-delta")

_TEXT_BYTES = 32 << 10
"""Of all rules: a writer learns its options in one message, and every part names the lossy ones."""

MOMENTS = {
    "*exp_avg": "fp8",
    "*momentum_buffer": "fp8",
    "*exp_avg_sq": "fp8-sqrt",
}
"""Moments of torch's Adam family and SGD by name, and how `moments="fp8"` stores each."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A codec for the tensors whose names a pattern fits, as in `fnmatch`."""

    pattern: str
    codec: str
    error: float | None = None
    """Of a lossy delta."""

    @property
    def lossy(self) -> bool:
        """Whether what comes back may be other values."""
        return self.codec in LOSSY

    def fits(self, name: str) -> bool:
        """Whether this rule is for a tensor."""
        return fnmatch.fnmatchcase(name, self.pattern)

    def made(self) -> Codec:
        """The codec, for encoding.

        Raises:
            ValueError: there is no such error.
        """
        if self.codec != "lossy-delta":
            return codec_named(self.codec)
        from torch_ckpt.codecs.residual import LossyDelta

        return LossyDelta() if self.error is None else LossyDelta(self.error)

    def __str__(self) -> str:
        error = "" if self.error is None else f" {self.error:g}"
        return f"{self.codec}{error} for {self.pattern}"


def rule_for(rules: Iterable[Rule], names: Iterable[str], default: str) -> Rule:
    """The rule for a block of these tensors; what loses anything must be meant for all of them."""
    rules = tuple(rules)
    wanted = {
        next((rule for rule in rules if rule.fits(name)), Rule("*", default)) for name in names
    }
    if len(wanted) == 1:
        return wanted.pop()
    lossless = [rule for rule in sorted(wanted, key=str) if not rule.lossy]
    return lossless[0] if lossless else Rule("*", default)


def grouping(rules: Iterable[Rule]) -> Callable[[str], int]:
    """Names to groups, one a rule: small tensors of different ones never share a block.

    Of a block that is two rules' business, neither may lose anything.
    """
    rules = tuple(rules)
    return lambda name: next((i for i, rule in enumerate(rules) if rule.fits(name)), len(rules))


def rules_of(
    codec: str | Mapping[str, str],
    moments: str | None,
    lossy_delta: float | Mapping[str, float] | None,
) -> tuple[str, tuple[Rule, ...]]:
    """The codec of tensors that no rule names, and the rules, as a user gives them.

    A plain number for `lossy_delta` names every tensor. Rules of `codec` come before `moments`,
    and these before `lossy_delta`.

    Raises:
        ConfigError: a codec, an error or a pattern cannot be used.
    """
    if isinstance(codec, Mapping):
        default, named = str(codec.get("*", "raw")), {k: v for k, v in codec.items() if k != "*"}
    else:
        default, named = codec, {}
    if default not in LOSSLESS:
        raise ConfigError(
            f"codec must be one of {', '.join(LOSSLESS)}, or map patterns of tensors' names to "
            f"codecs; got {default!r}"
        )
    if moments not in (None, "fp8"):
        raise ConfigError(f'moments must be "fp8" or None, got {moments!r}')
    rules = [_rule(pattern, name) for pattern, name in named.items()]
    rules += [Rule(*item) for item in (MOMENTS.items() if moments else ())]
    errors = {"*": lossy_delta} if not isinstance(lossy_delta, Mapping) else lossy_delta
    if lossy_delta is not None:
        rules += [_delta(pattern, error) for pattern, error in errors.items()]
    if (size := sum(len(ascii(str(rule))) for rule in rules)) > _TEXT_BYTES:
        raise ConfigError(
            f"{len(rules)} rules of codecs have {size} bytes of text, more than {_TEXT_BYTES}; "
            'name tensors by patterns such as "layers.*.weight" instead of one by one'
        )
    return default, tuple(rules)


def _rule(pattern: Any, codec: Any) -> Rule:
    known = (*LOSSLESS, "fp8", "fp8-sqrt")
    if not isinstance(pattern, str) or codec not in known:
        raise ConfigError(
            f"codec maps {pattern!r} to {codec!r}; codecs that a pattern can have are "
            f"{', '.join(known)}"
        )
    return Rule(pattern, codec)


def _delta(pattern: Any, error: Any) -> Rule:
    if not isinstance(pattern, str) or isinstance(error, bool):
        raise ConfigError(f"lossy_delta maps {pattern!r} to {error!r}; it maps patterns to errors")
    try:
        Rule(pattern, "lossy-delta", error).made()
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"lossy_delta cannot be {error!r}: {problem}") from problem
    return Rule(pattern, "lossy-delta", float(error))  # numpy's numbers do not go to a writer
