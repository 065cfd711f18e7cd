"""A save that may interrupt another one: in the calling thread, with memory of its own.

A signal handler can run in the middle of a save, a wait or a message to the writer, so nothing
here touches slabs, locks or the writer. Knows persisting. Knows nothing of the background.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from torch_ckpt.config import Config
from torch_ckpt.manifest.blocks import PAGE_BYTES
from torch_ckpt.pending import PendingSave
from torch_ckpt.sharding.plan import Plan
from torch_ckpt.staging.snapshot import copy_exactly
from torch_ckpt.staging.tree import Flat
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.persist import Watch, persist

_THREADS = 4


def save_inline(job: Job, flat: Flat, plan: Plan, store: Store, config: Config) -> PendingSave:
    """Copy, write and commit before returning; a save that is over.

    Raises:
        SaveFailed: it did not commit.
        StorageError: storage refused.
    """
    size = -(-plan.raw_bytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
    memory = mmap.mmap(-1, size)
    region = torch.frombuffer(memory, dtype=torch.uint8)
    for position, item in enumerate(plan.placed):
        piece = item.piece
        copy = region[item.start : item.start + piece.bytes].view(getattr(torch, piece.dtype))
        live = plan.part(position, flat.tensors[piece.name].detach())
        copy_exactly(copy.view(piece.shape), live)
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    agreed: Callable[[], str | None] = lambda: None  # noqa: E731
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-inline") as pool:
        watch = Watch(released=nothing, confirmed=agreed, abandoned=agreed)
        persist(job, memoryview(memory), store, pool, watch)
    pending = PendingSave(step=job.step, folder=job.folder, attempt=job.attempt)
    pending.bytes = pending.copied = plan.raw_bytes
    by_others = "it was saved from inside another call; the next run with this archive sends it"
    pending.unarchived = config.unarchived(elsewhere=False) or by_others
    pending.become("committed")
    return pending
