"""What a trainer hands over with a slab: where its bytes go and how they are laid out.

Knows JSON and sizes. Knows nothing of processes or stores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch_ckpt.manifest.blocks import Piece, Placed


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank's share of one save."""

    root: str
    """Where generations of this run live, as the store's URL."""
    folder: str
    step: int
    attempt: str
    run: str
    rank: int
    world_size: int
    created: str
    pieces: Sequence[Sequence[Any]]
    """Name, dtype, shape, offsets, whole shape and start of every piece in the slab."""
    raw_bytes: int
    aliases: Mapping[str, str] = field(default_factory=dict)
    tree: Any = None
    per_rank: Mapping[str, Any] = field(default_factory=dict)
    parent: Mapping[str, Any] | None = None
    mesh: Any = None
    """The meshes over which tensors are shared out, for people."""
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    framework: Mapping[str, str] = field(default_factory=dict)
    keep: Any = None
    """The retention rule as JSON; None prunes nothing."""
    same_as: str | None = None
    """A folder whose shard of this rank holds the same bytes: it gets a second name."""
    quantised: Sequence[Sequence[Any]] = ()
    """Starts of pieces that are codes and scales, and the names of their codecs."""
    commit_timeout_s: float = 1800.0

    def dump(self, described: bytes) -> bytes:
        """JSON; floats may be nan, since it never reaches storage.

        `described` is the JSON of `pieces`, which a caller keeps while its layout stays the same.
        """
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "pieces"}
        head = json.dumps(rest, separators=(",", ":")).encode("ascii")
        return head[:-1] + b',"pieces":' + described + b"}"

    @staticmethod
    def parse(data: bytes) -> Job:
        """The job that `dump` wrote."""
        return Job(**json.loads(data))

    def placed(self) -> list[Placed]:
        """The layout of the slab."""
        return [
            Placed(Piece(name, dtype, tuple(shape), tuple(offsets), tuple(whole)), start)
            for name, dtype, shape, offsets, whole, start in self.pieces
        ]
