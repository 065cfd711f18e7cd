"""What a writer is told of the tiers beside the primary one.

Knows values. Knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """What a writer is told of the tiers; fields as in `Config`."""

    world_size: int
    archive: str | None = None
    archive_options: Mapping[str, Any] = field(default_factory=dict)
    keep: Any = None
    """The primary tier's rule as JSON; None drops nothing."""
    keep_archive: Any = None
    """The archive's rule as JSON; None keeps all."""
    codec: str = "raw"
    """How the archive stores what the primary tier stores raw."""
    bandwidth_limit: float | None = None
    timeout_s: float = 0.0
    """How long to go on once the trainer has ended."""
    cache: str | None = None
