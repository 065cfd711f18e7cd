"""The options of checkpoints under Accelerate: a plugin that reads the environment, as
Accelerate's own plugins do, and a `ProjectConfiguration` that carries one.

Knows values and environment variables. Knows nothing of what is done with them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from accelerate.utils import ProjectConfiguration

from torch_ckpt import ConfigError, KeepLast, Retention, parse_rule

GATE = "ACCELERATE_USE_CKPT"
PREFIX = "ACCELERATE_CKPT_"

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "resume": ("auto", "never"),
    "skip": ("exact", "fast"),
    "mode": ("async", "sync"),
    "on_error": ("log", "raise"),
}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass
class CheckpointPlugin:
    """How an `Accelerator` saves and resumes.

    A field that is not given is read from the environment: `root` from `ACCELERATE_CKPT_ROOT`,
    `every` from `ACCELERATE_CKPT_EVERY`, and so on.

    Raises:
        ConfigError: a value cannot be used; the message names the field, or the variable.
    """

    root: str | os.PathLike[str] | None = None
    """Folder or fsspec URL for the generations of one run, the same for all ranks; by default
    `checkpoints` in the project's folder."""

    archive: str | os.PathLike[str] | None = None
    """Folder or URL to which committed generations are promoted."""

    cache: str | os.PathLike[str] | None = None
    """Folder on each node's own disk for its share of the newest generation."""

    every: int | None = None
    """Save by itself after so many optimizer steps, between two batches; 0: only when asked."""

    keep: Retention | str | None = None
    """Which generations stay, as a rule or in words: `last=3,every=1000`; `all` deletes none. By
    default the `total_limit` of the project's configuration, and all where it has none."""

    resume: str | None = None
    """auto: `load_state()` and `resume()` give the newest good generation; never: the run starts
    afresh, and what is there is set aside at the first save."""

    skip: str | None = None
    """exact: `skip_first_batches` reads batches again where workers may draw random numbers;
    fast: it never does."""

    codec: str | Mapping[str, str] | None = None
    """How blocks are stored: raw, zstd, auto, or by patterns of tensors' names; a mapping is JSON
    in the environment."""

    archive_codec: str | None = None
    """How the archive stores what the root stores raw: raw, zstd or auto."""

    moments: str | None = None
    """fp8: store the moments of optimizers in 8 bits and fewer, which loses something."""

    lossy_delta: float | Mapping[str, float] | None = None
    """Store changes up to this error of theirs, for all tensors or by patterns of their names."""

    incremental: bool | None = None
    """Store only what differs from the generation before, as far as that pays."""

    full_every: int | None = None
    """Generations that may build on one another before the next stands alone."""

    mode: str | None = None
    """sync: every save is committed when it returns."""

    on_error: str | None = None
    """raise: a failed save ends the next one."""

    timeout_s: float | None = None
    """How long ranks wait for one another in a save or load."""

    allow_pickle: bool | None = None
    """Whether loading may unpickle values that had to be pickled."""

    storage_options: Mapping[str, Any] | None = None
    """For fsspec, where `root` is a URL; JSON in the environment."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None and (text := os.environ.get(PREFIX + one.name.upper(), "").strip()):
                value = _parsed(one.name, text, PREFIX + one.name.upper())
            setattr(self, one.name, _checked(one.name, value))

    @property
    def rule(self) -> Retention | None:
        """The rule of `keep`; None where it is `all` or was not given."""
        return self.keep if isinstance(self.keep, Retention) else None

    def retention(self, total_limit: int | None) -> Retention | None:
        """What stays: the rule that was given, or as many as Accelerate's own limit says."""
        if self.keep is not None:
            return self.rule
        return KeepLast(total_limit) if total_limit else None

    def options(self) -> dict[str, Any]:
        """What `torch_ckpt.Checkpointer` is given, but for the root and what stays."""
        named = {"timeout_s": "agree_timeout_s"}
        wanted = ("archive", "cache", "mode", "on_error", "timeout_s", "allow_pickle")
        smaller = ("codec", "archive_codec", "moments", "lossy_delta", "incremental", "full_every")
        found = {name: getattr(self, name) for name in (*wanted, *smaller, "storage_options")}
        return {named.get(key, key): value for key, value in found.items() if value is not None}

    @classmethod
    def from_environment(cls) -> CheckpointPlugin | None:
        """The plugin that the environment asks for with `ACCELERATE_USE_CKPT=true`, if it does."""
        return cls() if wanted() else None


def wanted() -> bool:
    """Whether the environment asks for checkpoints of every Accelerator."""
    return _flag(os.environ.get(GATE, "false"), GATE)


@dataclass
class CkptProjectConfiguration(ProjectConfiguration):
    """Accelerate's `ProjectConfiguration`, with the plugin as one more field.

    `Accelerator(project_config=CkptProjectConfiguration(project_dir="runs/7", ckpt=
    CheckpointPlugin(every=500)))`; `attach(accelerator)` and `accelerate-ckpt launch` look for it.
    """

    ckpt: CheckpointPlugin = field(default_factory=CheckpointPlugin)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ckpt, CheckpointPlugin):
            raise ConfigError(f"ckpt must be a CheckpointPlugin, got {self.ckpt!r}")


# ── values ────────────────────────────────────────────────────────────────────────────────────


def _parsed(name: str, text: str, where: str) -> Any:
    """A value from the text of an environment variable."""
    try:
        if name in ("every", "full_every"):
            return int(text)
        if name == "timeout_s":
            return float(text)
        if name in ("storage_options", "lossy_delta") or text.startswith("{"):
            return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}={text!r} cannot be read: {error}") from error
    return _flag(text, where) if name in ("allow_pickle", "incremental") else text


def _checked(name: str, value: Any) -> Any:
    if name in _CHOICES and value not in (None, *_CHOICES[name]):
        choices = " or ".join(repr(one) for one in _CHOICES[name])
        raise ConfigError(f"{name} must be {choices}, got {value!r}")
    if name == "every" and value is not None and (type(value) is not int or value < 0):
        raise ConfigError(f"every must be a whole number of optimizer steps, got {value!r}")
    if name == "keep":
        return rule_of(value)
    if name == "codec":
        return None if value in (None, "none") else value
    if name == "storage_options" and not isinstance(value, Mapping | None):
        raise ConfigError(f"storage_options must map names to values, got {value!r}")
    return value


def rule_of(value: Any) -> Retention | str | None:
    """A rule, or what says that there is none: None, or `all`.

    Raises:
        ConfigError: it is neither.
    """
    if value is None or isinstance(value, Retention) or value == "all":
        return value
    if isinstance(value, str):
        return parse_rule(value)
    raise ConfigError(f"keep must be a rule, or words such as last=3, or all; got {value!r}")


def _flag(text: str, where: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE or not word:
        return word in _TRUE
    raise ConfigError(f"{where}={text!r} is neither true nor false")
