"""The writer: takes slabs from a trainer, makes them durable in order, and outlives the trainer.

One thread listens to the trainer, one works through the jobs, a pool hashes and writes blocks.
When the trainer is gone, whatever way, what it had handed over is finished; then the process
ends. Knows jobs and stores. Knows nothing of tensors.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from torch_ckpt.errors import CkptError
from torch_ckpt.storage.store import Store, open_beside, open_store
from torch_ckpt.writer import orphan
from torch_ckpt.writer.encode import Encoder, Encoding
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.leftovers import refuse
from torch_ckpt.writer.neighbours import Neighbours
from torch_ckpt.writer.outcomes import Outcomes
from torch_ckpt.writer.persist import Watch, persist
from torch_ckpt.writer.protocol import Channel, Message
from torch_ckpt.writer.removal import Removals
from torch_ckpt.writer.share import Share
from torch_ckpt.writer.tier_options import TierOptions
from torch_ckpt.writer.tiers import Tiers

logger = logging.getLogger(__name__)

_BEAT_S = 0.3
_NICE = 5
_THREADS = 4
_REASON_CHARS = 4096  # messages are small


@dataclass(kw_only=True)
class _Pending:
    """One job between arrival and report."""

    number: int
    message: Message
    confirmed: threading.Event = field(default_factory=threading.Event)
    discarded: str | None = None
    released: bool = False


class Writer:
    """Serves one trainer until it closes or dies."""

    def __init__(
        self,
        channel: Channel,
        *,
        root: str,
        rank: int,
        trainer: int | None,
        storage_options: Mapping[str, Any] | None = None,
        tiers: Mapping[str, Any] | None = None,
        encoding: Mapping[str, Any] | None = None,
        slabs: dict[int, memoryview] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._channel, self._root, self._rank, self._trainer = channel, root, rank, trainer
        self._listener = listener
        self._storage_options = storage_options
        self._slabs = {} if slabs is None else slabs
        self._stores: dict[str, Store] = {}
        self._jobs: queue.Queue[_Pending | None] = queue.Queue()
        self._pending: dict[int, _Pending] = {}
        self._abandoned: dict[str, str] = {}
        self._trainer_gone = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-block")
        self._neighbours = Neighbours(root)
        self._outcomes = Outcomes()
        self._callers: list[socket.socket] = []
        self._tiers: Tiers | None = None
        if tiers is not None:
            self._tiers = Tiers(
                TierOptions(**tiers),
                rank=rank,
                primary=lambda: open_store(root, storage_options),
                report=self._report,
            )
        self._encoder = None if encoding is None else Encoder(Encoding.of(encoding))
        self._removals = Removals(None if self._tiers is None else self._tiers.let_go)
        self._step: int | None = None
        self._parent: Mapping[str, Any] | None = None

    def serve(self) -> None:
        """Work until the trainer has closed or died and every job is done."""
        worker = threading.Thread(target=self._work, name="ckpt-jobs", daemon=True)
        worker.start()
        listener = self._listener
        pidfd = None
        try:
            pidfd = self._watch()
            self._listen(listener, pidfd)
            self._trainer_gone.set()
            for pending in list(self._pending.values()):
                pending.confirmed.set()
            self._jobs.put(None)
            while worker.is_alive():
                if listener is not None:
                    self._answer(listener)
                self._channel.offer({"event": "beat"})  # a trainer that closes still listens
                worker.join(0.1)
            self._finish_tiers()
        finally:
            self._pool.shutdown()
            self._neighbours.close()
            for end in (*self._callers, *([listener] if listener is not None else [])):
                end.close()
            if pidfd is not None:
                os.close(pidfd)

    def _finish_tiers(self) -> None:
        """Promote what waits, for a while, unless a new trainer waits for this writer to end."""
        if self._tiers is None:
            return

        def hurried() -> bool:
            if self._listener is not None:
                self._answer(self._listener)
            self._channel.offer({"event": "beat"})
            return any(map(orphan.is_hurried, self._callers))

        self._tiers.finish(hurried)

    def _watch(self) -> int | None:
        """A descriptor that becomes readable when the trainer ends."""
        if self._trainer is None:
            return None
        descriptor = None
        with contextlib.suppress(OSError):  # gone already, or a kernel without it
            descriptor = os.pidfd_open(self._trainer)
        # A trainer can be killed while its writer starts; what it had sent waits in the socket.
        if os.getppid() != self._trainer:  # before the descriptor was made: its id may be reused
            self._trainer_gone.set()
        return descriptor

    def _listen(self, listener: socket.socket | None, pidfd: int | None) -> None:
        """Receive until the trainer says close or is gone; take in all it sent before."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        for source in (listener, pidfd):
            if source is not None:
                poll.register(source, select.POLLIN)
        while True:
            trainer_ended = self._trainer_gone.is_set()
            ready = dict(poll.poll(0 if trainer_ended else _BEAT_S * 1000))
            if self._channel.fileno() in ready:
                message = self._channel.receive()
                if message is None or message["op"] == "close":
                    return
                self._take(message)
            elif trainer_ended:
                return
            orphaned = self._trainer is not None and os.getppid() != self._trainer
            if orphaned or (pidfd is not None and pidfd in ready):
                self._trainer_gone.set()  # forked children may hold the socket open for ever
            if listener is not None and listener.fileno() in ready:
                self._answer(listener)
            if self._pending:
                self._channel.offer({"event": "beat"})

    def _answer(self, listener: socket.socket) -> None:
        caller = orphan.tell(
            listener,
            {
                "trainer": self._trainer,
                "alive": not self._trainer_gone.is_set(),
                "writer": os.getpid(),
                "step": self._step,
            },
        )
        if caller is not None:
            self._callers.append(caller)

    def _take(self, message: Message) -> None:
        op = message["op"]
        if op == "slab":
            self._map(message)
        elif op in ("persist", "remove", "refuse"):
            pending = _Pending(number=message["job"], message=message)
            if message.get("confirmed", True):
                pending.confirmed.set()
            self._pending[pending.number] = pending
            self._jobs.put(pending)
        elif op in ("confirm", "discard"):
            pending = self._pending.get(message["job"])
            if pending is not None:
                pending.discarded = message.get("reason")
                pending.confirmed.set()
        elif op == "abandon":
            self._abandoned[message["attempt"]] = message["reason"]
            self._outcomes.doubt(message["attempt"])

    def _map(self, message: Message) -> None:
        descriptor = self._channel.take_fd()
        try:
            access = mmap.PROT_READ
            if self._encoder is not None and self._encoder.encoding.lossy:
                access |= mmap.PROT_WRITE
            mapping = mmap.mmap(descriptor, message["bytes"], prot=access)
        finally:
            os.close(descriptor)
        self._slabs[message["slab"]] = memoryview(mapping)

    def _work(self) -> None:
        work = {"persist": self._persist, "remove": self._remove, "refuse": self._refuse}
        while (pending := self._jobs.get()) is not None:
            try:
                work[pending.message["op"]](pending)
            except Exception as error:  # whatever it is: the trainer waits for an outcome
                self._removals.failed()
                self._release(pending)
                self._report(
                    {
                        "event": "failed",
                        "job": pending.number,
                        "reason": _reason(error)[:_REASON_CHARS],
                    }
                )
                logger.debug("job %d failed", pending.number, exc_info=error)
            finally:
                self._pending.pop(pending.number, None)
        self._removals.end()

    def _persist(self, pending: _Pending) -> None:
        message = pending.message
        slab = self._slabs[message["slab"]]
        start = message["doc_start"]
        job = Job.parse(bytes(slab[start : start + message["doc_bytes"]]))
        if self._parent is not None:
            job = replace(job, parent=self._parent)
        self._step = job.step
        began = time.monotonic()
        store = self._store(job.root)
        for folder in message.get("lost", ()):
            self._outcomes.failed(store, folder)
        self._outcomes.begin(job, store)
        share = Share(self._encoder if job.root == self._root else None, late=message["late"])
        watch = Watch(
            released=lambda: self._release(pending),
            confirmed=lambda: self._await_confirmation(pending),
            abandoned=lambda: self._abandoned.get(job.attempt),
            alone=self._trainer_gone.is_set,
            gone=self._neighbours.gone,
            **self._duties(job, slab, share),
        )
        if job.rank == 0:
            self._neighbours.look(range(1, job.world_size))
        try:
            manifest = persist(job, slab, store, self._pool, watch, share.write)
        except BaseException:
            self._outcomes.failed(store, job.folder)
            share.failed()
            raise
        finally:
            for failure in self._outcomes.in_vain():
                self._report({"event": "lost", "step": failure.step, "reason": failure.reason})
        self._outcomes.done(job, store)
        if job.root == self._root:
            self._parent = {"step": job.step, "attempt": job.attempt}
        self._report(
            {
                "event": "committed",
                "job": pending.number,
                "persist_s": time.monotonic() - began,
                "bytes": manifest.bytes,
                "held": share.holds,
                "anchors": share.anchors_next(job, manifest),
            }
        )
        if self._tiers is not None and job.root == self._root:
            self._tiers.voted(job, manifest, store, held=share.holds)
        self._removals.committed()

    def _duties(self, job: Job, slab: memoryview, share: Share) -> dict[str, Any]:
        """What a save has to do besides: for the tiers, or for the next save."""
        tiers = self._tiers
        duties: dict[str, Any] = {} if share.encoder is None else {"keep": share.keep}
        if tiers is None or job.root != self._root:
            return duties
        if tiers.options.archive is not None:
            duties["prune"] = lambda store, rule: tiers.prune_primary(store, rule, job.run)
        if (cache := tiers.cache) is not None:
            if share.encoder is None:
                duties["keep"] = lambda placed, done: cache.keep(job, placed, slab, done)
            else:
                cache.keep_encoded(job)
        return duties

    def _remove(self, pending: _Pending) -> None:
        message = pending.message
        self._removals.submit(self._store(message["root"]), message["folder"])
        self._report({"event": "removed", "job": pending.number})

    def _refuse(self, pending: _Pending) -> None:
        """Tell the coordinator of a save that this writer never got, or that died with another."""
        note = pending.message
        refuse(self._store(self._root), note["folder"], self._rank, note["attempt"], note["reason"])

    def _await_confirmation(self, pending: _Pending) -> str | None:
        pending.confirmed.wait()
        return pending.discarded

    def _release(self, pending: _Pending) -> None:
        if not pending.released:
            pending.released = True
            self._report({"event": "released", "job": pending.number})

    def _store(self, root: str) -> Store:
        if root not in self._stores:
            self._stores[root] = open_beside(root, self._root, self._storage_options)
        return self._stores[root]

    def _report(self, message: Message) -> None:
        if self._trainer_gone.is_set():
            self._channel.offer(message)  # one that closes still listens
            return
        try:
            self._channel.send(message)
        except OSError:
            logger.debug("the trainer is gone: %s", message["event"])


def _reason(error: Exception) -> str:
    if isinstance(error, CkptError):
        return str(getattr(error, "reason", error))
    return f"{type(error).__name__}: {error}"


class _Forward(logging.Handler):
    """Log records of the writer appear in the trainer's log."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)[:4096]
        self._channel.offer({"event": "log", "level": record.levelno, "text": text})


def main(descriptor: int) -> None:
    """Entry of the side process: the channel, whose first message says who is served."""
    channel = Channel(socket.socket(fileno=descriptor))
    served = channel.receive()
    if served is None:
        return  # the trainer is gone
    with contextlib.suppress(OSError):
        os.nice(_NICE)  # training comes first; disks follow the same priority
    logging.getLogger("torch_ckpt").addHandler(_Forward(channel))
    logging.getLogger("torch_ckpt").setLevel(served.pop("log_level"))
    number = served.pop("listener")
    listener = socket.socket(fileno=number) if number is not None else None
    writer = Writer(channel, listener=listener, **served)
    channel.offer({"event": "ready", "pid": os.getpid()})
    writer.serve()
    # At once: the interpreter would wait for threads that wait for an archive which hangs.
    sys.stderr.flush()
    os._exit(0)
