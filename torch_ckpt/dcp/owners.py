"""Who writes what several ranks hold: every rank about the same number of bytes.

DCP's own choice weighs a piece by the size of the whole tensor, which is wrong for pieces of
sharded ones. Knows save plans. Knows nothing of storage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

Offered = Sequence[MetadataIndex]
"""What one rank could write, in the order of its state."""


def balanced(plans: Sequence[SavePlan], offered: Sequence[Offered]) -> list[SavePlan]:
    """The same items, each on one of the ranks that offered it.

    What is not a tensor goes to the lowest rank that has it, so that rank 0 can write the document
    of the state. Where the planner put every shared tensor on the lowest rank, that was asked for
    (`dedup_save_to_lowest_rank`) and stays.
    """
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, indices in enumerate(offered):
        for index in indices:
            holders.setdefault(index, []).append(rank)
    assigned: list[list[WriteItem]] = [[] for _ in plans]
    loads = [0] * len(plans)
    shared: list[tuple[int, WriteItem]] = []  # where the planner put it
    for rank, plan in enumerate(plans):
        for item in plan.items:
            able = holders.get(item.index, [rank])
            if item.type is WriteItemType.BYTE_IO:
                assigned[able[0]].append(item)
            elif len(able) > 1:
                shared.append((rank, item))
            else:
                assigned[rank].append(item)
                loads[rank] += bytes_of(item)
    if all(rank == holders[item.index][0] for rank, item in shared):
        for rank, item in shared:
            assigned[rank].append(item)
    else:
        for _, item in sorted(shared, key=lambda one: -bytes_of(one[1])):
            owner = min(holders[item.index], key=loads.__getitem__)
            assigned[owner].append(item)
            loads[owner] += bytes_of(item)
    return [
        replace(plan, items=_in_order(items, indices))
        for plan, items, indices in zip(plans, assigned, offered, strict=True)
    ]


def bytes_of(item: WriteItem) -> int:
    """The bytes of the piece that an item stands for; 0 if it is not a tensor."""
    data = item.tensor_data
    if data is None or data.chunk is None:
        return 0
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _in_order(items: list[WriteItem], offered: Offered) -> list[WriteItem]:
    place = {index: number for number, index in enumerate(offered)}
    return sorted(items, key=lambda item: place.get(item.index, len(place)))
