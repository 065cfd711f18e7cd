"""DCP's StorageWriter over generations: each rank its shard and part, the manifest last.

Knows DCP's save plans and results. Knows nothing of how a save was asked for or staged.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import torch
from torch.distributed.checkpoint import SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_ckpt.config import check_root
from torch_ckpt.dcp.checkpoint_id import parse_checkpoint_id, to_write
from torch_ckpt.dcp.nesting import tree_of
from torch_ckpt.dcp.orders import Offer, Order, Vote, offers_of
from torch_ckpt.dcp.owners import balanced
from torch_ckpt.dcp.share import Share
from torch_ckpt.dcp.tally import check_names, check_whole, collect
from torch_ckpt.errors import CkptError, ConfigError, SaveFailed
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.retention import Retention, to_json
from torch_ckpt.manifest.attempts import Attempts
from torch_ckpt.manifest.commit import publish_manifest, publish_part
from torch_ckpt.manifest.layout import part_name
from torch_ckpt.manifest.schema import Part, StoredFile
from torch_ckpt.storage.store import Store, open_store
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.leftovers import withdraw, withdraw_all
from torch_ckpt.writer.persist import manifest_of, tidy

logger = logging.getLogger(__name__)

_FRAMEWORK = {"torch.distributed.checkpoint": str(torch.__version__)}


@dataclass
class _Save:
    """What one rank remembers between DCP's calls for one save."""

    checkpoint_id: object = None
    folder: str = ""
    step: int = 0
    keys: frozenset[str] = frozenset()
    job: Job | None = None
    part: Part | None = None
    """Of rank 0, until its tree is known."""


class Writer(StorageWriter):
    """Writes generations for `torch.distributed.checkpoint.save` and `async_save`.

    Args:
        root: The folder or URL under which the generations of a run lie.
        keep: Which generations stay after a commit; None removes nothing.
        storage_options: For the fsspec file system, if the root is a URL.

    `checkpoint_id` of the save is the step (`500`), or a name or path under the root that holds it
    (`step-500`, `outputs/checkpoint/step-500`). The generation exists once `finish` has published
    its manifest, and a crash before that leaves none. DCP raises what goes wrong on any rank as its
    `CheckpointException`, whose `failures` hold this package's errors by rank.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: Retention | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = check_root(root)
        self._keep = to_json(keep) if keep is not None else None
        self._options = dict(storage_options or {})
        self._attempts = Attempts()
        self._run = ""
        self._parent: dict[str, Any] | None = None
        self._thread = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        """For DCP's side process; a save under way stays where it is."""
        return {name: value for name, value in self.__dict__.items() if name != "_thread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._thread = threading.local()

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Begin a save; what the id means is checked once all ranks can hear of it."""
        self._thread.save = _Save(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Settle where this rank writes.

        Raises:
            ConfigError: no usable `checkpoint_id`, or a save without collectives.
        """
        save = self._save
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "a save with use_collectives=False has no coordinator, who would commit it; "
                "leave that option out"
            )
        if save.checkpoint_id is None:
            raise ConfigError("this save has no checkpoint_id; pass the step, such as 500")
        wanted = parse_checkpoint_id(save.checkpoint_id, self.root)
        save.folder, save.step = to_write(wanted)
        save.checkpoint_id = None  # DCP does not call `reset` for a save without one

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add what this rank could write, before DCP drops what others write too.

        Raises:
            ConfigError: the planner left its plan out.
        """
        if not plan.usable:
            raise ConfigError(
                "the planner sends no plan when it has not changed; "
                "leave out enable_plan_caching=True"
            )
        save = self._save
        save.keys = frozenset(item.index.fqn for item in plan.items)
        indices = tuple(item.index for item in plan.items)
        return replace(plan, storage_data=Offer(save.folder, save.step, indices))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Balance what is written once, and give every rank the names of this save.

        Raises:
            DisagreementError: ranks were given different ids.
            UnsupportedState: the planner did not plan a tensor whole and once.
        """
        offers = offers_of([plan.storage_data for plan in plans])
        folder, step = offers[0].folder, offers[0].step
        check_whole(plans)
        self._join_run(step)
        order = Order(
            rank=0,
            world_size=len(plans),
            folder=folder,
            step=step,
            attempt=self._attempts.next(),
            run=self._run,
            created=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            parent=self._parent,
        )
        return [
            replace(plan, storage_data=replace(order, rank=rank))
            for rank, plan in enumerate(balanced(plans, [offer.indices for offer in offers]))
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Make this rank's shard and part durable, which is its vote.

        Raises:
            UnsupportedState: something cannot be saved; the message names it.
            StorageError: storage refused.
        """
        save, order = self._save, plan.storage_data
        if not isinstance(order, Order) or (order.folder, order.step) != (save.folder, save.step):
            raise SaveFailed(step=save.step, reason="the planner returned the plan of another save")
        store = self._store()
        share = Share(plan, planner, order, save.keys)
        job = share.job(store, keep=self._keep, framework=_FRAMEWORK)
        part = share.write(job, store)
        voted = None
        if order.rank == 0:
            save.job, save.part = job, part
        else:
            voted = self._publish(store, job, part)
        result = WriteResult(
            index=MetadataIndex(part_name(order.rank, order.attempt)),
            size_in_bytes=share.raw_bytes,
            storage_data=Vote(
                rank=order.rank,
                part=voted,
                stored_bytes=sum(file.bytes for file in part.files),
                documents=share.documents,
                inner=share.inner,
            ),
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result([result])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: only if every rank's part is there, with the digest it was voted with.

        Raises:
            SaveFailed: one is not, or they do not make a whole state; there is no generation.
            StorageError: storage refused.
        """
        save, store = self._save, self._store()
        job, part = save.job, save.part
        if job is None or part is None:
            raise SaveFailed(step=save.step, reason="the coordinator wrote nothing")
        votes = [result.storage_data for rank in results for result in rank]
        try:
            check_names(job, votes, metadata)
            documents = {key: doc for vote in votes for key, doc in vote.documents.items()}
            own = publish_part(store, job.folder, replace(part, tree=tree_of(metadata, documents)))
            stored_bytes = sum(vote.stored_bytes for vote in votes)
            manifest = manifest_of(job, (own, *collect(store, job, votes)), stored_bytes)
        except (CkptError, OSError):
            withdraw_all(store, job.folder, job.attempt)
            raise
        finally:
            save.job = save.part = None
        # Last: from here on the generation exists. A failure may come after that, so nothing is
        # removed then.
        publish_manifest(store, job.folder, manifest)
        self._parent = {"step": job.step, "attempt": job.attempt}
        tidy(job, store)
        logger.info(
            "step %d is committed: %d ranks, %d bytes", job.step, job.world_size, stored_bytes
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether an id is a step, a name or a path."""
        return isinstance(checkpoint_id, (int, str, os.PathLike))

    @staticmethod
    def _publish(store: Store, job: Job, part: Part) -> StoredFile:
        try:
            return publish_part(store, job.folder, part)
        except (CkptError, OSError):
            withdraw(store, job.folder, job.rank, job.attempt)
            raise

    def _join_run(self, step: int) -> None:
        """Continue the run that is in the root; only the coordinator asks, and only once."""
        if self._run:
            return
        there = [one for one in Catalog(self._store()).committed() if not one.set_apart]
        before = next((one for one in there if one.step < step), None)  # newest first
        self._run = there[0].manifest.run if there else Attempts.new_run()
        if before is not None:
            self._parent = {"step": before.step, "attempt": before.manifest.attempt}

    def _store(self) -> Store:
        return open_store(self.root, self._options)

    @property
    def _save(self) -> _Save:
        """Of this thread: DCP runs each save on one, and two saves may be under way."""
        save = getattr(self._thread, "save", None)
        if save is None:
            save = self._thread.save = _Save()
        return save
