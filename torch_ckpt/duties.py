"""What a writer is told to do besides storing snapshots in the root as they are.

Knows the options. Knows nothing of processes or saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_ckpt.config import Config
from torch_ckpt.generations.retention import multiples, to_json
from torch_ckpt.writer.rules import rules_of

_SEAL_S = 30.0
"""How long a writer whose trainer has ended waits for a commit to complete the cached copy."""


def duties_of(config: Config, world_size: int) -> dict[str, Any]:
    """The options of a writer, as it takes them, for one rank of so many."""
    duties: dict[str, Any] = {}
    if (tiers := tier_options(config, world_size)) is not None:
        duties["tiers"] = tiers
    if config.encodes:
        codec, rules = rules_of(config.codec, config.moments, config.lossy_delta)
        duties["encoding"] = {
            "codec": codec,
            "rules": [[rule.pattern, rule.codec, rule.error] for rule in rules],
            "incremental": config.incremental,
            "full_every": config.full_every,
            "permanent_every": multiples(config.keep_archive) if config.promotes else (),
        }
    return duties


def tier_options(config: Config, world_size: int) -> Mapping[str, Any] | None:
    """What a writer is told of the tiers beside the primary one; None if there are none."""
    if config.cache is None and not config.promotes:
        return None
    return {
        "world_size": world_size,
        "cache": config.cache,
        "archive": config.archive if config.promotes else None,
        "archive_options": config.archive_options,
        "keep": None if config.keep is None else to_json(config.keep),
        "keep_archive": None if config.keep_archive is None else to_json(config.keep_archive),
        "codec": "raw" if config.encodes else config.archive_codec,
        "bandwidth_limit": config.bandwidth_limit,
        "timeout_s": config.archive_timeout_s if config.promotes else _SEAL_S,
    }
