"""Saves between the copy and the report: the writer that has them, and what became of them.

Knows the writer's client and pending saves. Knows nothing of states or tensors.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch_ckpt.config import Config
from torch_ckpt.duties import duties_of
from torch_ckpt.errors import ArchiveTaken, CkptError, SaveFailed, WriterDied
from torch_ckpt.pending import PendingSave
from torch_ckpt.staging.slab import Slab
from torch_ckpt.staging.slots import Slots
from torch_ckpt.storage.lustre import targets_under
from torch_ckpt.writer.client import WriterClient
from torch_ckpt.writer.protocol import Message

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_SUCCESSORS = 3
"""Writers that are started, between two commits, only to promote what a dead one had to."""
_REASON_CHARS = 4096  # messages are small
_LOST = 16
"""Folders of failed saves that a writer hears of: its predecessor may have died with them."""


@dataclass(kw_only=True)
class Running:
    """A save that is not over."""

    pending: PendingSave
    memory: Slab
    client: WriterClient | None = None
    """The writer that was handed it; None before."""
    confirmed_at: float | None = None
    released: bool = False
    lost: list[str] = field(default_factory=list)
    """Folders of failed saves that its commit clears up."""

    @property
    def slab(self) -> int:
        """The number of its slab."""
        return self.memory.number

    @property
    def handed_over(self) -> bool:
        """Whether a writer has it."""
        return self.client is not None


class Handover:
    """Gives slabs to the writer, takes them back, and keeps failures until they are raised."""

    def __init__(self, config: Config, root: str, ranks: tuple[int, int], slots: Slots) -> None:
        """`ranks` is this rank and how many there are."""
        self._config, self._root, self._slots = config, root, slots
        self._rank, self._world_size = ranks
        self._unarchived: dict[str, PendingSave] = {}
        self._client: WriterClient | None = None
        self._running: dict[int, Running] = {}
        self._held: dict[int, Running] = {}
        """Saves that are over, and whose slab the writer still compares the next one with."""
        self._jobs = 0
        self._failures: list[CkptError] = []
        self._lost: deque[str] = deque(maxlen=_LOST)
        self._starting = threading.RLock()
        self._closed, self._successors = False, 0
        self._changed = threading.Condition()
        self.on_failure: Callable[[PendingSave], None] = lambda pending: None
        self.committed: PendingSave | None = None
        """The save that committed last."""

    @property
    def writer_pid(self) -> int | None:
        """The side process; None if there is none."""
        client = self._client
        return client.pid if client is not None and client.dead is None else None

    def start_writer(self) -> WriterClient:
        """The running writer, a new one if there is none."""
        with self._starting:
            if self._client is None or self._client.dead is not None:
                self._client = WriterClient(
                    root=self._root,
                    rank=self._rank,
                    storage_options=self._config.storage_options,
                    duties=duties_of(self._config, self._world_size),
                    timeout_s=self._config.writer_timeout_s,
                    on_event=self._on_event,
                    on_death=self._on_death,
                    busy=self._awaits_answer,
                    overdue=self._overdue,
                )
            return self._client

    def register(self, pending: PendingSave, slab: Slab, root: str) -> int:
        """Begin a job: the writer can map its slab, and its outcome will reach `pending`."""
        self._insist(lambda client: _attach(client, slab))
        job = self._next_job()
        pending.unarchived = self._config.unarchived(elsewhere=root != self._root)
        with self._changed:
            self._running[job] = Running(pending=pending, memory=slab)
        return job

    def _next_job(self) -> int:
        with self._changed:
            self._jobs += 1
            return self._jobs

    def _insist(self, say: Callable[[WriterClient], None]) -> None:
        """Say something to a writer, to a new one if the old one turns out to be dead."""
        for last in (False, True):
            try:
                say(self.start_writer())
                return
            except OSError:
                if last:
                    raise
                time.sleep(_POLL_S)  # it died just now; its client is about to notice

    def hand_over(self, job: int, message: Message) -> None:
        """The slab is complete and the writer's. Runs on the caller's or the copying thread."""
        running, client = self._running.get(job), self._client
        if running is None:
            return
        if client is None:
            self.fail(job, WriterDied(step=running.pending.step, reason="its writer was closed"))
            return
        running.client = client
        if message["confirmed"]:
            running.confirmed_at = time.monotonic()
        try:
            running.lost = list(self._lost)
            _attach(client, running.memory)  # it may be a new one since the save began
            client.send(
                {"op": "persist", "job": job, "slab": running.slab, "lost": running.lost, **message}
            )
            if client.dead is not None:  # one that cannot be killed still takes messages
                raise OSError(client.dead)
        except OSError:
            reason = client.dead or "its writer is gone"
            self.fail(job, WriterDied(step=running.pending.step, reason=reason))
        else:
            running.pending.become("staged")

    def confirm(self, job: int) -> None:
        """The snapshot holds what it should: the writer may commit it."""
        running = self._running.get(job)
        if running is not None and not running.pending.done:
            running.confirmed_at = time.monotonic()
            self.tell({"op": "confirm", "job": job})

    def discard(self, job: int, error: SaveFailed) -> None:
        """The snapshot is no good: the writer drops what it has of it."""
        running = self._running.get(job)
        if running is not None:
            # With the writer already: its slab comes back when the writer lets go of it.
            self.fail(job, error, over=not running.handed_over)
            self.tell({"op": "discard", "job": job, "reason": error.reason[:_REASON_CHARS]})

    def remove(self, root: str, folder: str) -> None:
        """Queue a removal behind the saves handed over so far."""
        message = {"op": "remove", "job": self._next_job(), "root": root, "folder": folder}
        self._insist(lambda client: client.send(message))

    def tell(self, message: Message) -> None:
        """Say something that a dead writer need not hear."""
        if self._client is not None and self._client.dead is None:
            try:
                self._client.send(message)
            except OSError:
                logger.debug("the writer is gone; its jobs fail on their own")

    def writes(self, folder: str) -> bool:
        """Whether a save into a folder of this name is not over."""
        return any(r.pending.folder == folder for r in list(self._running.values()))

    def uses(self, slab: int) -> bool:
        """Whether a job will give this slab back."""
        return any(r.slab == slab and not r.released for r in list(self._running.values()))

    def wait(self, timeout_s: float | None) -> None:
        """Until no save is running that has been vouched for.

        One that has not is being made by the very call that this one interrupts.

        Raises:
            TimeoutError: some still are, and go on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while steps := [
                str(r.pending.step) for r in self._running.values() if r.confirmed_at is not None
            ]:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"the save of step {', '.join(steps)} is not committed; it goes on"
                    )
                self._changed.wait(_POLL_S if left is None else min(left, _POLL_S))

    def raise_failure(self) -> None:
        """Raise the oldest failure that was not raised yet; the others are in the log."""
        with self._changed:
            failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def forgive(self) -> None:
        """Forget failures that the caller has just been told."""
        with self._changed:
            self._failures.clear()

    def close(self) -> None:
        """Let the writer finish, and end it."""
        self.wait(None)  # a writer that was told to close reports no more outcomes
        with self._starting:  # a new writer may be on its way to tell of a failure
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()
        self._will_not_be_archived("its writer has ended; the next run with this archive sends it")

    # What the writer says. Runs on the client's thread.

    def _awaits_answer(self) -> bool:
        return any(running.handed_over for running in list(self._running.values()))

    def _overdue(self) -> str | None:
        limit = 2 * self._config.commit_timeout_s
        for running in list(self._running.values()):
            if running.confirmed_at is not None and time.monotonic() - running.confirmed_at > limit:
                targets = targets_under(f"{self._root}/{running.pending.folder}")
                on = f", on OST {', '.join(map(str, targets))}" if targets else ""
                return f"storage did not finish step {running.pending.step} in {limit:g} s{on}"
        return None

    def _on_event(self, message: Message) -> None:
        job, event = message.get("job", 0), message["event"]
        if event == "lost":
            self._note(SaveFailed(step=message["step"], reason=message["reason"]))
        elif event == "archived":
            self._archived(message)
        elif event == "taken":
            self._note(ArchiveTaken(**{n: message[n] for n in ("archive", "owner", "run")}))
        if event == "released" and job in self._held:
            self._release(self._held.pop(job))
        running = self._running.get(job)
        if running is None:
            return
        if event == "released":
            self._release(running)
        elif event == "committed":
            self._committed(job, running, message)
        elif event == "failed":
            error = SaveFailed(step=running.pending.step, reason=message["reason"])
            self.fail(job, error, told=True)

    def _committed(self, job: int, running: Running, message: Message) -> None:
        pending = running.pending
        pending.persist_s, pending.anchors_next = message["persist_s"], message["anchors"]
        self.committed = pending
        self._successors = 0
        for folder in running.lost:
            with contextlib.suppress(ValueError):  # the same folder may have been lost twice
                self._lost.remove(folder)
        if message["held"]:
            self._held[job] = running
        else:
            self._release(running)
        if pending.unarchived is None:
            with self._changed:
                self._unarchived[pending.attempt] = pending
        pending.become("committed")
        self._finish(job)
        logger.info(
            "step %d is committed: %.1f MB in %.2f s, training stood still for %.4f s",
            pending.step,
            message["bytes"] / 1e6,
            message["persist_s"],
            pending.blocked_s,
        )

    def _archived(self, message: Message) -> None:
        with self._changed:
            pending = self._unarchived.pop(message["attempt"], None)
        if pending is not None:
            pending.is_archived(message["reason"])

    @property
    def archive_lag(self) -> int:
        """Saves of this process that are committed and not in the archive yet."""
        return len(self._unarchived)

    def _on_death(self, client: WriterClient, reason: str) -> None:
        if self.committed is not None:
            self.committed.anchors_next = False  # a new writer has seen nothing to go on from
        # Its own alone: a new writer may be at work before the old one is reaped.
        for job in [job for job, one in list(self._held.items()) if one.client is client]:
            self._release(self._held.pop(job))
        for job, running in list(self._running.items()):
            if running.client is client:
                self.fail(job, WriterDied(step=running.pending.step, reason=reason))
        if self._unarchived:
            self._succeed(reason)

    def _succeed(self, reason: str) -> None:
        """Have another writer promote what a dead one had to; no save may come that starts one."""
        with self._starting:
            if self._closed:
                return
            self._successors += 1
            if self._successors <= _SUCCESSORS:
                try:
                    self.start_writer()
                    return
                except (OSError, CkptError) as problem:
                    reason = f"{reason}; a new one does not start: {problem}"
        self._will_not_be_archived(f"{reason}; the next save or run with this archive sends it")

    def _will_not_be_archived(self, reason: str) -> None:
        with self._changed:
            left, self._unarchived = self._unarchived, {}
        for pending in left.values():
            pending.is_archived(reason)

    def fail(self, job: int, error: SaveFailed, *, over: bool = True, told: bool = False) -> None:
        """Note a failure; `over` says that its slab is free again, `told` that others will know."""
        running = self._running.get(job)
        if running is None:
            return
        self.refuse(running.pending, error, told=told or not over)
        if over:
            self._release(running)
            self._finish(job)

    def refuse(self, pending: PendingSave, error: SaveFailed, *, told: bool = False) -> None:
        """Note that a save failed, unless its outcome is known already.

        Unless a writer has `told`, the coordinator hears that it need not wait for this rank.
        """
        if pending.done:
            return
        self._note(error)
        if self._rank == 0:
            self._lost.append(pending.folder)
        elif not told:
            self._tell_coordinator(pending, error)
        self.on_failure(pending)
        pending.become("failed", error)

    def _note(self, error: CkptError) -> None:
        logger.error("%s", error)
        with self._changed:
            self._failures.append(error)

    def _tell_coordinator(self, pending: PendingSave, error: SaveFailed) -> None:
        """Leave word of a save that no writer of ours will vote for, through a new one if need be.

        Otherwise the coordinator waits for its whole time-out if no later save tells it.
        """
        message: Message = {
            "op": "refuse",
            "folder": pending.folder,
            "attempt": pending.attempt,
            "reason": error.reason[:_REASON_CHARS],
        }
        with self._starting:
            if self._closed:
                return
            message["job"] = self._next_job()
            try:
                self._insist(lambda client: client.send(message))
            except (OSError, CkptError) as problem:
                logger.debug("the coordinator is not told: %s", problem)

    def _release(self, running: Running) -> None:
        with self._changed:
            if running.released:
                return
            running.released = True
        self._slots.release(running.slab)

    def _finish(self, job: int) -> None:
        with self._changed:
            self._running.pop(job, None)
            self._changed.notify_all()


def _attach(client: WriterClient, slab: Slab) -> None:
    client.attach(slab.number, slab.version, slab.fd, slab.bytes, slab.buffer)
