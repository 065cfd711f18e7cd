"""The save, top to bottom: take the state apart, agree, copy, fence, hand over.

Knows slabs, plans and the writer's client. Knows nothing of how bytes become durable or of which
generation a run starts from.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch

from torch_ckpt.config import Block, Config
from torch_ckpt.errors import CkptError, DisagreementError, SaveFailed, SaveSkipped, SnapshotTorn
from torch_ckpt.folders import Folders
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.retention import to_json
from torch_ckpt.handover import Handover
from torch_ckpt.manifest.attempts import Attempts
from torch_ckpt.manifest.blocks import PAGE_BYTES
from torch_ckpt.pending import PendingSave
from torch_ckpt.quantising import Quantising
from torch_ckpt.sharding.agree import Agreement, Proposal, Ranks
from torch_ckpt.sharding.differences import facts_of
from torch_ckpt.sharding.plan import Plan, Planner, Survey
from torch_ckpt.sources import sources_of
from torch_ckpt.staging.ownership import Unchanged, expected_growth, unowned
from torch_ckpt.staging.slab import Slab
from torch_ckpt.staging.slots import Slots
from torch_ckpt.staging.snapshot import Snapshot
from torch_ckpt.staging.tree import Flat, flatten
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.job import Job

logger = logging.getLogger(__name__)

_DOCUMENT_SLACK_BYTES = 1 << 20
_PATIENCE = 0.5
"""Of the time that peers wait: how long a rank waits for storage before all of them go on."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a caller wants saved, and where."""

    state: Any
    step: int
    block: Block
    root: str
    folder: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    named: bool = False
    """Whether the caller chose the folder's name, and may choose a second one for the same step."""


class Saver:
    """Saves of one run by one rank."""

    def __init__(self, config: Config, store: Store, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._planner = Planner(ranks.rank, ranks.world_size, config.group)
        self._attempts = Attempts()
        self._slots = Slots(config.slabs)
        self._copying: tuple[int, Snapshot, PendingSave] | None = None
        self._unchanged = Unchanged()
        self.handover = Handover(config, store.url, (ranks.rank, ranks.world_size), self._slots)
        self.handover.on_failure = self._on_failure
        self.run: str | None = None
        self.parent: Mapping[str, Any] | None = None
        """The generation this run resumed from."""
        self.folders = Folders(store, builds=config.builds)
        self._quantising = Quantising(config, ranks.world_size, store.url)
        self._patience_s = config.agree_timeout_s * _PATIENCE if ranks.world_size > 1 else math.inf

    def prepare(self, state: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Size the slabs for a state, touch their memory in the background, start the writer."""
        self.settle()
        try:
            self.handover.start_writer()
        except OSError as error:
            logger.warning("no writer could be started, the first save tries again: %s", error)
        flat = flatten(state, rank=self._ranks.rank)
        size = self._planner.estimate(flat)
        size += expected_growth([*optimizers, *flat.optimizers], flat)
        for slab in self._slots.slabs:
            slab.reserve(size + 2 * _DOCUMENT_SLACK_BYTES, pin=_any_cuda(flat))
            slab.prefault()

    def save(self, request: Request) -> PendingSave:
        """Copy what may change soon, and return; see `Checkpointer.save`."""
        self.settle()
        began = time.monotonic()
        flat, survey, refusal = self._take_apart(request)
        waits = self._config.on_busy == "wait" and refusal is None
        slab = self._slots.take_within(self._patience_s) if waits else None
        busy = slab is None and refusal is None and self._slots.all_taken()
        try:
            agreement = self._agree(request, flat, survey, refusal, busy=busy)
            request = self._clear(request, agreement.attempt, permanent=agreement.permanent)
            pending = PendingSave(
                step=request.step, folder=request.folder, attempt=agreement.attempt
            )
            if agreement.busy:
                return self._skip(pending, slab)
            self._quantising.began(pending)
            slab = slab or self._slots.take()
            try:
                plan = self._planner.plan(
                    flat,
                    self._ranks.exchange,
                    afresh=agreement.stale,
                    unowned=partial(unowned, flat, request.optimizers),
                )
                self._copy(request, flat, plan, slab, pending, anchored=agreement.anchored)
            except (OSError, MemoryError, RuntimeError) as error:
                if isinstance(error, CkptError):
                    raise
                # Out of memory, descriptors, threads or processes: the next save may find them.
                self.handover.refuse(pending, _not_copied(request.step, error))
                if not self.handover.uses(slab.number):
                    self._slots.release(slab.number)
        except BaseException:
            if slab is not None and not self.handover.uses(slab.number):
                self._slots.release(slab.number)
            raise
        pending.blocked_s += time.monotonic() - began
        return pending

    def _take_apart(self, request: Request) -> tuple[Flat, Survey, Exception | None]:
        """The flat state; an error is kept, so that the other ranks hear of it."""
        try:
            if self._config.on_error == "raise":
                self.handover.raise_failure()
            flat = flatten(request.state, rank=self._ranks.rank)
            return flat, self._planner.survey(flat), None
        except Exception as error:  # whatever a `state_dict` of the caller's raises
            return Flat(), Survey((), ""), error

    def _agree(
        self,
        request: Request,
        flat: Flat,
        survey: Survey,
        refusal: Exception | None,
        *,
        busy: bool,
    ) -> Agreement:
        if self.run is None:
            self.run = self._ranks.share(self._attempts.new_run())
        agreement = self._ranks.agree(
            Proposal(
                step=request.step,
                fingerprint=survey.fingerprint,
                attempt=self._attempts.next(),
                run=str(self.run),
                folder=request.folder,
                permanent="permanent" in request.tags,
                busy=busy,
                refused=refusal is not None,
                stale=self._planner.stale,
                # One for which training had to wait is left to the writer, which may hurry.
                anchored=not self._slots.late
                and self._quantising.is_anchored(request.step, self.folders.apart),
                failed=tuple(self._attempts.failed),
                facts=partial(facts_of, flat),
            )
        )
        for attempt in agreement.failed:
            reason = "its share failed on another rank"
            self.handover.tell({"op": "abandon", "attempt": attempt, "reason": reason})
        error = refusal or agreement.refusal
        if error is not None:
            raise error
        self.folders.look(request.folder, self._ranks.share, leads=self._ranks.rank == 0)
        return agreement

    def _clear(self, request: Request, attempt: str, *, permanent: bool) -> Request:
        """The same request, beside what has to stay, and permanent where rank 0 says so."""
        folder = self.folders.clear(request.folder, request.step, attempt)
        tags = dict.fromkeys(["permanent"] if permanent else [], "")
        return replace(request, folder=folder, tags=tags if self._ranks.rank else request.tags)

    def _skip(self, pending: PendingSave, slab: Slab | None) -> PendingSave:
        if slab is not None:
            self._slots.release(slab.number)
        error = SaveSkipped(step=pending.step, reason="all slabs are still being written")
        logger.warning("%s", error)
        pending.become("skipped", error)
        return pending

    def _copy(
        self,
        request: Request,
        flat: Flat,
        plan: Plan,
        slab: Slab,
        pending: PendingSave,
        *,
        anchored: bool,
    ) -> None:
        same_as = self._same_as(request, flat)
        described = self._job(request, flat, plan, pending.attempt, same_as)
        # Behind the tensors also for a second name: this may be the slab that holds the first.
        start = -(-plan.raw_bytes // PAGE_BYTES) * PAGE_BYTES
        slab.reserve(start + _DOCUMENT_SLACK_BYTES, pin=_any_cuda(flat))
        owners = request.optimizers if request.block == "copied" else None
        eager, lazy = ([], []) if same_as else sources_of(flat, plan, owners)
        pending.bytes, pending.copied = plan.raw_bytes, 0 if same_as else plan.raw_bytes
        coding = self._quantising.coding(described) if lazy and anchored else None
        snapshot = Snapshot(slab, eager, lazy, coding)
        job = self.handover.register(pending, slab, request.root)
        # Before the hand-over, whose failure must find it to take it back.
        if same_as is not None:
            self._unchanged.rename(request.folder)
        elif not request.named:
            self._unchanged.forget()  # nothing refers to it by name, and remembering costs time
        else:
            self._unchanged.remember(
                request.root, request.step, request.folder, flat, slab, [*eager, *lazy]
            )

        def hand_over() -> None:
            # Last, and with an overlapped copy on its thread: training does not wait for it.
            told = described
            if coding is not None:
                told = replace(described, quantised=coding.quantised)
                pending.copied -= coding.spared
            document = told.dump(plan.described_json)
            slab.reserve(start + len(document) + _DOCUMENT_SLACK_BYTES)
            slab.buffer[start : start + len(document)] = document
            place = {"doc_start": start, "doc_bytes": len(document), "confirmed": not lazy}
            self.handover.hand_over(job, {**place, "late": self._slots.was_late()})

        try:
            snapshot.begin()
            if lazy:
                snapshot.start(hand_over)
                self._copying = (job, snapshot, pending)
            else:
                snapshot.complete()
                hand_over()
        except BaseException as error:  # also an interrupt: whoever waits must not wait for ever
            snapshot.abandon()  # first: a slab that is given back must not be written any more
            self._copying = None
            self.handover.discard(job, _not_copied(request.step, error))
            raise

    def _job(
        self, request: Request, flat: Flat, plan: Plan, attempt: str, same_as: str | None
    ) -> Job:
        leads = self._ranks.rank == 0
        return Job(
            root=request.root,
            folder=request.folder,
            step=request.step,
            attempt=attempt,
            run=str(self.run),
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            created=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            pieces=plan.described,
            raw_bytes=plan.raw_bytes,
            aliases={a: n for a, n in flat.aliases.items() if leads or n in flat.own},
            tree=flat.tree if leads else None,
            per_rank=flat.per_rank,
            parent=self.parent,
            mesh=list(plan.mesh) or None,
            tags=request.tags,
            metrics=request.metrics,
            framework=self._config.framework,
            keep=to_json(self._config.keep) if self._config.keep is not None else None,
            same_as=same_as,
            commit_timeout_s=self._config.commit_timeout_s,
        )

    def _same_as(self, request: Request, flat: Flat) -> str | None:
        """The folder of the last save if this one is only another name for it."""
        if self._ranks.world_size > 1:
            return None
        if "permanent" in request.tags and self._config.builds:
            return None  # what has the other name may have lost something, or need what may go
        return self._unchanged.folder_of(request.root, request.step, request.folder, flat)

    def settle(self) -> None:
        """Complete a copy that goes on behind training, and vouch for it or discard it.

        Cut short by an interrupt, it leaves the copy to the next call; called from within itself,
        as by a signal handler, it does the whole.
        """
        copying = self._copying
        if copying is None:
            return
        job, snapshot, pending = copying
        began = time.monotonic()
        failure: SaveFailed | None = None
        try:
            if moved := snapshot.complete():
                failure = SnapshotTorn(step=pending.step, tensors=moved)
        except RuntimeError as error:
            failure = _not_copied(pending.step, error)
        finally:
            pending.blocked_s += time.monotonic() - began
        if self._copying is not copying:
            return
        if failure is not None:
            self.handover.discard(job, failure)
        else:
            self.handover.confirm(job)
        self._copying = None

    def wait_committed(self, pending: PendingSave) -> None:
        """Wait; a failure is raised by the caller's choice, and stays on the pending save."""
        try:
            pending.wait()
        except CkptError:
            if self._config.mode == "async" or self._config.on_error == "raise":
                self.handover.forgive()
                raise

    def inline_job(self, request: Request) -> tuple[Job, Flat, Plan]:
        """A whole job for a save that interrupts another; touches nothing that one may hold.

        Raises:
            DisagreementError: there are several ranks, whose signals do not come together.
        """
        if self._ranks.world_size > 1:
            raise DisagreementError(
                f"step {request.step} cannot be saved from inside another call of this "
                "checkpointer on several ranks; save after it has returned"
            )
        flat = flatten(request.state, rank=self._ranks.rank)
        planner = Planner(0, 1)
        planner.survey(flat)
        plan = planner.plan(flat, lambda rows: [rows])
        self.run = self.run or Attempts.new_run()
        attempt = Attempts().next()
        if self.handover.writes(request.folder):
            # Each of two saves in one folder would take the other's files for leftovers.
            request = replace(request, folder=f"{request.folder}-{attempt}")
        else:
            # Without a look, which it may interrupt: where nothing is known yet, it goes beside.
            request = self._clear(request, attempt, permanent="permanent" in request.tags)
        job = self._job(request, flat, plan, attempt, None)
        if self._config.promotes:  # only the writer knows what the archive has
            job = replace(job, keep=None)
        return job, flat, plan

    def remove(self, root: str, folder: str) -> None:
        """Queue a removal behind the saves so far."""
        self.settle()
        self.forget()  # its files can get no second name, and nothing may build on it
        self.handover.remove(root, folder)

    def go_on_from(self, generation: Generation | None, apart: Iterable[str]) -> None:
        """The live state is that of a generation now; None for a fresh run.

        `apart` are folders that saves leave as they are.
        """
        self.forget()
        self.folders.leave(apart)
        if generation is not None:
            self.run = generation.manifest.run
            self.parent = dict(zip(("step", "attempt"), generation.id, strict=True))

    def forget(self) -> None:
        """The live state was replaced: nothing of it is known to be saved."""
        self._unchanged.forget()
        self._quantising.forget()

    def _on_failure(self, pending: PendingSave) -> None:
        self._unchanged.forget()
        self._attempts.failed.append(pending.attempt)

    def close(self) -> None:
        """Finish what was handed over, end the writer, free the slabs."""
        self.settle()
        self.handover.close()
        self._slots.close()


def _any_cuda(flat: Flat) -> bool:
    return any(tensor.is_cuda for tensor in flat.tensors.values())


def _not_copied(step: int, error: BaseException) -> SaveFailed:
    cause = error.__cause__ or error
    return SaveFailed(
        step=step, reason=f"copying the state failed: {str(cause) or type(cause).__name__}"
    )
