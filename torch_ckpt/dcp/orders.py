"""What ranks tell each other about one save, on the back of DCP's own plans and results.

Knows plain facts. Knows nothing of planners or stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex

from torch_ckpt.errors import DisagreementError, SaveFailed
from torch_ckpt.manifest.schema import StoredFile
from torch_ckpt.staging.objects import Json


@dataclass(frozen=True)
class Offer:
    """From each rank to the coordinator: what it could write, and where it thinks it writes."""

    folder: str
    step: int
    indices: tuple[MetadataIndex, ...]


@dataclass(frozen=True, kw_only=True)
class Order:
    """From the coordinator to each rank: the names and facts of this save."""

    rank: int
    world_size: int
    folder: str
    step: int
    attempt: str
    run: str
    created: str
    parent: Mapping[str, Any] | None


@dataclass(frozen=True)
class Vote:
    """From each rank to the coordinator: what it made durable."""

    rank: int
    part: StoredFile | None
    """Name, length and digest of its part; rank 0 publishes its own only with the tree."""
    stored_bytes: int
    """Of its shard."""
    documents: Mapping[str, Json] = field(default_factory=dict)
    """By key, the values that are not tensors."""
    inner: tuple[str, ...] = ()
    """Names under which it stored tensors and arrays that are inside such values."""


def offers_of(given: list[Any]) -> list[Offer]:
    """The offers of all ranks, if they are for one generation.

    Raises:
        SaveFailed: a planner lost them.
        DisagreementError: ranks were given different ids; names both.
    """
    offers = [one for one in given if isinstance(one, Offer)]
    if len(offers) != len(given):
        raise SaveFailed(
            step=offers[0].step if offers else -1,
            reason="the planner dropped the plans' storage_data, which the Writer needs",
        )
    for rank, offer in enumerate(offers):
        if (offer.folder, offer.step) != (offers[0].folder, offers[0].step):
            raise DisagreementError(
                f"rank 0 saves step {offers[0].step} in {offers[0].folder!r}, rank {rank} step "
                f"{offer.step} in {offer.folder!r}; give all ranks the same checkpoint_id"
            )
    return offers
