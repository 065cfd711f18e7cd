"""The options of a checkpointer, checked when they are given.

Knows values. Knows nothing of what is done with them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from torch_ckpt.errors import ConfigError
from torch_ckpt.generations.retention import KeepEvery, KeepLast, Retention
from torch_ckpt.manifest.index import MAX_CHAIN
from torch_ckpt.storage.spelling import place_of
from torch_ckpt.writer.rules import grouping, rules_of

_READ_ONLY = ("http://", "https://")

Block = Literal["copied", "staged", "committed"]
BLOCKS: tuple[Block, ...] = ("copied", "staged", "committed")


class EncodingOptions(TypedDict, total=False):
    """Options of a `Checkpointer` that make generations smaller, as adapters pass them on."""

    codec: str | Mapping[str, str]
    archive_codec: Literal["raw", "zstd", "auto"]
    moments: Literal["fp8"] | None
    lossy_delta: float | Mapping[str, float] | None
    incremental: bool
    full_every: int


@dataclass(frozen=True, kw_only=True)
class Config:
    """How one run is saved and resumed."""

    root: str
    """A folder or fsspec URL that holds the generations of one run."""

    keep: Retention | None = field(default_factory=lambda: KeepLast(3))
    """Which generations stay after a commit; None never deletes one."""

    mode: Literal["async", "sync"] = "async"
    """sync: every save returns when it is committed."""

    slabs: Literal[1, 2] = 2
    """Snapshots in host memory at once."""

    on_busy: Literal["wait", "skip"] = "wait"
    """What a save does while all slabs are still being written."""

    on_error: Literal["log", "raise"] = "log"
    """Whether a failed save also ends the next `save`; `wait` and `close` always raise it, once."""

    fence: Literal["optimizer", "manual"] = "optimizer"
    """optimizer: the next step of any optimizer completes a copy; manual: `fence()` does."""

    distributed: bool | None = None
    """None: with the other ranks where torch.distributed is initialised; False: alone."""

    writer_timeout_s: float = 60.0
    """A writer that gives no sign of life for so long is replaced."""

    commit_timeout_s: float = 1800.0
    """A save that is not committed by then is given up."""

    agree_timeout_s: float = 300.0
    """How long ranks wait for one another at the start of a save or load."""

    orphan_timeout_s: float = 600.0
    """How long a new trainer waits for the writer of a dead one."""

    allow_pickle: bool = False
    """Whether loading may unpickle values that had to be pickled."""

    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the fsspec file system."""

    archive: str | None = None
    """A folder or fsspec URL to which committed generations are promoted."""

    keep_archive: Retention | None = field(default_factory=lambda: KeepLast(20))
    """Which generations stay in the archive, and so which are promoted; None keeps all."""

    archive_options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the fsspec file system of the archive."""

    archive_timeout_s: float = 300.0
    """How long a writer whose trainer has ended goes on promoting."""

    bandwidth_limit: float | None = None
    """Bytes a second that one writer sends to the archive at most."""

    cache: str | None = None
    """A folder on this node's own disk that holds its share of the newest generation."""

    codec: str | Mapping[str, str] = "raw"
    """How blocks are stored: raw, zstd (byte planes), auto (so where it is faster); or this by
    patterns of tensors' names, where fp8 and fp8-sqrt are possible too."""

    archive_codec: Literal["raw", "zstd", "auto"] = "auto"
    """How the archive stores what the root stores raw."""

    moments: Literal["fp8"] | None = None
    """How the moments of optimizers are stored; fp8 loses something."""

    lossy_delta: float | Mapping[str, float] | None = None
    """Largest error of what changed since the last generation, as a part of that change."""

    incremental: bool = False
    """Whether a generation stores only what differs from the one before, as far as that pays."""

    full_every: int = 8
    """Generations that may build on one another before the next stands alone."""

    framework: Mapping[str, str] = field(default_factory=dict)
    """Names and versions to record in the manifest."""

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, ("async", "sync"))
        _one_of("slabs", self.slabs, (1, 2))
        _one_of("on_busy", self.on_busy, ("wait", "skip"))
        _one_of("on_error", self.on_error, ("log", "raise"))
        _one_of("fence", self.fence, ("optimizer", "manual"))
        _one_of("distributed", self.distributed, (None, True, False))
        if self.keep is not None and not isinstance(self.keep, Retention):
            raise ConfigError(
                f"keep must be a rule such as KeepLast(3), or None to keep all; got {self.keep!r}"
            )
        _check_tiers(self)
        _check_encoding(self)
        for name, version in self.framework.items():
            if not isinstance(name, str) or not isinstance(version, str):
                raise ConfigError(f"framework must map names to texts, got {name!r}: {version!r}")
        for name in ("writer_timeout_s", "commit_timeout_s", "agree_timeout_s", "orphan_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name} must be a positive number of seconds, got {value!r}")

    @property
    def promotes(self) -> bool:
        """Whether what is committed goes on to an archive, rather than only coming from one."""
        return self.archive is not None and not self.archive.startswith(_READ_ONLY)

    def unarchived(self, *, elsewhere: bool) -> str | None:
        """Why a save will never come into an archive; None if it will.

        `elsewhere` says that it is not under the run's root.
        """
        if self.archive is None:
            return "this run has no archive"
        if not self.promotes:
            return "an archive over HTTP is only read"
        return "what is saved into a folder outside the root is not archived" if elsewhere else None

    @property
    def encodes(self) -> bool:
        """Whether shards may be anything but the bytes of the state."""
        default, rules = rules_of(self.codec, self.moments, self.lossy_delta)
        return default != "raw" or bool(rules) or self.incremental

    @property
    def group(self) -> Callable[[str], int]:
        """Tensors' names to the rules that they are stored by; each has blocks of its own."""
        return grouping(rules_of(self.codec, self.moments, self.lossy_delta)[1])

    @property
    def loses(self) -> bool:
        """Whether some generations may come back as other values."""
        _, rules = rules_of(self.codec, self.moments, self.lossy_delta)
        return any(rule.lossy for rule in rules)

    @property
    def builds(self) -> bool:
        """Whether a generation may need an earlier one."""
        return self.incremental or self.loses

    def block(self, asked: Block | None) -> Block:
        """When a save returns that was asked to return at `asked`.

        Raises:
            ConfigError: there is no such moment.
        """
        if asked is not None and asked not in BLOCKS:
            raise ConfigError(f"block must be one of {', '.join(BLOCKS)}, got {asked!r}")
        return "committed" if self.mode == "sync" else asked or "copied"


def archive_rule(
    permanent_every: int | None, asked: Retention | Literal["default"] | None
) -> Retention | None:
    """What an archive keeps: the rule that was asked for, or else the newest 20.

    Raises:
        ConfigError: `permanent_every` is no number of steps.
    """
    rule = KeepLast(20) if asked == "default" else asked
    if permanent_every is None or rule is None:
        return rule
    return rule | KeepEvery(permanent_every)


def _check_tiers(config: Config) -> None:
    if config.keep_archive is not None and not isinstance(config.keep_archive, Retention):
        raise ConfigError(
            "keep_archive must be a rule such as KeepLast(20), or None to keep all; got "
            f"{config.keep_archive!r}"
        )
    if config.root.startswith(_READ_ONLY):
        raise ConfigError(f"{config.root} cannot be written; give it as archive, or another root")
    if config.cache is not None and "://" in config.cache:
        raise ConfigError(f"cache must be a folder on this node's own disk, got {config.cache!r}")
    places = [one for one in (config.root, config.archive, config.cache) if one is not None]
    if len(set(map(place_of, places))) < len(places):
        raise ConfigError("root, archive and cache must be three different places")
    limit = config.bandwidth_limit
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float))):
        raise ConfigError(f"bandwidth_limit must be bytes a second, or None; got {limit!r}")
    if limit is not None and not limit >= 1 << 16:
        raise ConfigError(f"bandwidth_limit must be 65536 bytes a second or more, got {limit!r}")
    if not isinstance(config.archive_timeout_s, (int, float)) or config.archive_timeout_s < 0:
        raise ConfigError(
            f"archive_timeout_s must be a number of seconds, got {config.archive_timeout_s!r}"
        )


def _check_encoding(config: Config) -> None:
    rules_of(config.codec, config.moments, config.lossy_delta)
    _one_of("archive_codec", config.archive_codec, ("raw", "zstd", "auto"))
    if config.archive_codec == "zstd" and (config.encodes or config.archive is None):
        raise ConfigError(
            f"archive_codec={config.archive_codec!r} encodes what the root stores raw, so it goes "
            'with archive=, codec="raw" and incremental=False'
        )
    _one_of("incremental", config.incremental, (True, False))
    if type(config.full_every) is not int or not 1 <= config.full_every <= MAX_CHAIN:
        raise ConfigError(
            f"full_every must be a whole number from 1 to {MAX_CHAIN}, got {config.full_every!r}"
        )
    if config.incremental and config.slabs != 2:
        raise ConfigError("incremental=True compares two snapshots, so it needs slabs=2")
    if config.lossy_delta is not None and not config.incremental:
        raise ConfigError("lossy_delta stores changes, so it needs incremental=True")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value is one or (value == one and type(value) is type(one)) for one in allowed):
        choices = " or ".join(repr(one) for one in allowed)
        raise ConfigError(f"{name} must be {choices}, got {value!r}")


def check_root(root: str | os.PathLike[str], name: str = "root") -> str:
    """The root as text; `name` is what the caller calls it.

    Raises:
        ConfigError: it is empty or not a path.
    """
    try:
        text = os.fspath(root)
    except TypeError as error:
        raise ConfigError(f"{name} must be a path or URL, got {root!r}") from error
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{name} must be a path or URL, got {root!r}")
    return text


def check_step(step: object) -> int:
    """The step as an int.

    Raises:
        ConfigError: it is not a whole number from 0 up.
    """
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise ConfigError(f"step must be a whole number, got {step!r}")
    number = step.__index__()  # type: ignore[attr-defined]
    if not 0 <= number < 1 << 62:
        raise ConfigError(f"step must be a whole number from 0 up, got {number}")
    return number


def check_tags(tags: Iterable[str]) -> dict[str, str]:
    """Tags without reasons.

    Raises:
        ConfigError: they are one text, or not text, or say what only a writer knows.
    """
    names = list(tags)
    if isinstance(tags, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'tags must be several texts, such as ("permanent",); got {tags!r}')
    if "lossy" in names:
        raise ConfigError("the tag lossy says how a generation is stored; choose another word")
    return dict.fromkeys(names, "")


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as floats.

    Raises:
        ConfigError: a name is not text or a value is not a number.
    """
    checked: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"metric {name!r} must be a number, got {value!r}") from error
        if not isinstance(name, str):
            raise ConfigError(f"a metric's name must be text, got {name!r}")
        checked[name] = number
    return checked
