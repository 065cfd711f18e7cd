"""The coordinator's checks: every tensor planned whole and once, every vote kept.

Knows plans, votes and documents in storage. Knows nothing of tensors' bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt.dcp.orders import Vote
from torch_ckpt.errors import FormatError, SaveFailed, UnsupportedState
from torch_ckpt.manifest.commit import collect_vote
from torch_ckpt.manifest.layout import part_name
from torch_ckpt.manifest.schema import StoredFile
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.job import Job

_COLLECTORS = 8


def check_whole(plans: Sequence[SavePlan]) -> None:
    """Check that the pieces of every tensor are as many elements as it has.

    Raises:
        UnsupportedState: a planner left some out or planned some twice; names the key.
    """
    planned: Counter[str] = Counter()
    whole: dict[str, int] = {}
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is not None and data.chunk is not None:
                planned[item.index.fqn] += math.prod(data.chunk.sizes)
                whole[item.index.fqn] = math.prod(data.size)
    for key, elements in whole.items():
        if planned[key] != elements:
            raise UnsupportedState(
                key=key,
                what=f"planned with {planned[key]} elements instead of {elements}",
                remedy="let the planner give each of them to one rank",
            )


def check_names(job: Job, votes: Sequence[Vote], metadata: Metadata) -> None:
    """Check that no two ranks stored something under one name.

    Raises:
        SaveFailed: they did; names it.
    """
    taken = set()
    for vote in votes:
        for name in vote.inner:
            # Under its own key a value may store the array that it is.
            if name in taken or (
                name in metadata.state_dict_metadata and name not in vote.documents
            ):
                raise SaveFailed(
                    step=job.step, reason=f"two values store something as {name!r}; rename one"
                )
            taken.add(name)


def collect(store: Store, job: Job, votes: Sequence[Vote]) -> list[StoredFile]:
    """The parts of the other ranks as they are in storage, which is as they were voted.

    Raises:
        SaveFailed: one is not there, or is another; names the rank.
    """
    by_rank = {vote.rank: vote.part for vote in votes if vote.part is not None}

    def found(rank: int) -> StoredFile:
        voted, reason = by_rank.get(rank), "it did not vote"
        if voted is not None:
            try:
                stored = collect_vote(store, job.folder, part_name(rank, job.attempt))
            except FormatError as error:
                reason = str(error)
            else:
                if stored is not None and stored[0] == voted:
                    return voted
                reason = "it is not there" if stored is None else "its digest is not the voted one"
        raise SaveFailed(step=job.step, reason=f"the part of rank {rank} does not count: {reason}")

    with ThreadPoolExecutor(_COLLECTORS, thread_name_prefix="ckpt-collect") as pool:
        return list(pool.map(found, range(1, job.world_size)))
