"""From a slab to a committed generation: blocks, shard, part, votes, manifest.

The order of the steps is the safety: what a document names is durable before the document is.
Knows stores and documents. Knows nothing of processes, sockets or tensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeAlias

from torch_ckpt.errors import CkptError, SaveFailed
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.prune import prune
from torch_ckpt.generations.retention import Retention, from_json
from torch_ckpt.manifest.blocks import Placed
from torch_ckpt.manifest.commit import (
    publish_manifest,
    publish_part,
    read_manifest,
    write_latest,
)
from torch_ckpt.manifest.schema import Manifest, StoredFile
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.leftovers import refuse, sweep_own, withdraw, withdraw_all
from torch_ckpt.writer.shard import Written, part_of, second_name, write_shard
from torch_ckpt.writer.votes import Outside, await_votes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What the outside may say while a job runs."""

    released: Callable[[], None]
    """Called once the slab is not needed any more."""
    confirmed: Callable[[], str | None]
    """Waits until the trainer vouches for the snapshot; a reason means: discard it."""
    abandoned: Callable[[], str | None]
    """A reason if this save will never be complete."""
    alone: Callable[[], bool] = lambda: False
    """Whether the trainer is gone."""
    gone: Callable[[Iterable[int]], frozenset[int]] = lambda ranks: frozenset()
    """Those of some ranks whose writers were on this node and have ended."""
    keep: Callable[[list[Placed], Callable[[], None]], None] | None = None
    """Copies the slab elsewhere and then calls what it is given; None where nobody wants it."""
    prune: Callable[[Store, Retention], None] | None = None
    """Prunes in place of the rule alone: another tier has a say."""


Write: TypeAlias = Callable[[Job, "list[Placed]", memoryview, Store, Executor], Written]
"""Makes the bytes of one rank durable, as `write_shard` does."""


def persist(
    job: Job,
    slab: memoryview,
    store: Store,
    pool: Executor,
    watch: Watch,
    write: Write = write_shard,
) -> Manifest:
    """Make one rank's share durable; on rank 0, commit the generation and prune.

    Ranks other than 0 return the manifest that rank 0 will publish, without its parts.

    Raises:
        SaveFailed: a rank did not vote, or the save was discarded.
        StorageError: storage refused; what this attempt wrote is removed as far as possible.
    """
    began = time.monotonic()
    voting = False
    try:
        store.make_folder(job.folder)
        placed = job.placed()
        if job.same_as is not None:
            written = second_name(job, store)
        else:
            written = write(job, placed, slab, store, pool)
        own_s = time.monotonic() - began
        if watch.keep is None:
            watch.released()
        else:
            watch.keep(placed, watch.released)
        reason = watch.confirmed() or watch.abandoned()
        if reason is not None:
            raise SaveFailed(step=job.step, reason=reason)
        voting = True
        own = publish_part(store, job.folder, part_of(job, placed, written))
        if job.rank != 0:
            return manifest_of(job, (own,), written.bytes)
        outside = Outside(
            abandoned=watch.abandoned, alone=watch.alone, own_s=own_s, gone=watch.gone
        )
        votes = await_votes(store, job, (own, written), pool, outside)
        manifest = manifest_of(job, votes.parts, votes.shard_bytes, votes.bases)
        if votes.lossy:
            manifest = manifest.with_tags({**manifest.tags, "lossy": ", ".join(votes.lossy)})
    except (CkptError, OSError) as error:
        watch.released()
        _give_up(job, store, error, voting=voting)
        raise
    try:
        publish_manifest(store, job.folder, manifest)
    except (CkptError, OSError):
        # Even now the manifest may be there, and then it must find everything that it names.
        if store.capabilities.files and not _published(job, store):
            withdraw_all(store, job.folder, job.attempt)
        raise
    tidy(job, store, watch.prune)
    return manifest


def _give_up(job: Job, store: Store, error: Exception, *, voting: bool) -> None:
    """Free what is ours to free, and tell who would wait."""
    if job.rank == 0:
        withdraw_all(store, job.folder, job.attempt)
        return
    if not voting:  # a vote that the coordinator may have counted cannot be taken back
        withdraw(store, job.folder, job.rank, job.attempt)
    reason = error.reason if isinstance(error, SaveFailed) else str(error)
    refuse(store, job.folder, job.rank, job.attempt, reason)


def manifest_of(
    job: Job, parts: tuple[StoredFile, ...], stored_bytes: int, bases: tuple[int, ...] = ()
) -> Manifest:
    """The manifest that names these parts, which build on the steps `bases`."""
    return Manifest(
        step=job.step,
        attempt=job.attempt,
        run=job.run,
        created=job.created,
        world_size=job.world_size,
        parts=parts,
        bytes=stored_bytes,
        parent=job.parent,
        bases=bases,
        mesh=job.mesh,
        tags=job.tags,
        metrics=job.metrics,
        framework=job.framework,
    )


def tidy(
    job: Job, store: Store, prune_with: Callable[[Store, Retention], None] | None = None
) -> None:
    """Tidy up; the generation is committed, so a failure here is a warning."""
    # Each on its own: a full disk refuses the first and is freed by the others.
    duties: list[Callable[[], None]] = [
        lambda: write_latest(store, job.folder),
        lambda: sweep_own(store, job.folder, job.attempt),
        lambda: _prune(job, store, prune_with),
    ]
    for duty in duties:
        try:
            duty()
        except (CkptError, OSError) as error:
            logger.warning(
                "step %d is committed, but tidying up after it failed: %s", job.step, error
            )


def _prune(job: Job, store: Store, prune_with: Callable[[Store, Retention], None] | None) -> None:
    if job.keep is None:
        return
    rule = from_json(job.keep)
    if prune_with is not None:
        prune_with(store, rule)
    else:
        prune(Catalog(store), rule, run=job.run, over=lambda key: True)


def _published(job: Job, store: Store) -> bool:
    """Whether a manifest may be there; one of another attempt counts too."""
    try:
        read_manifest(store, job.folder)
    except FileNotFoundError:
        return False
    except (CkptError, OSError):
        return True
    return True
