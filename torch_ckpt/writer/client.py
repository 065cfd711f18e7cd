"""The trainer's handle on its writer: starts it, talks to it, notices when it dies or stops.

Knows processes and messages. Knows nothing of tensors or of what a job means.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch_ckpt.writer.forks import drop_on_fork
from torch_ckpt.writer.orphan import listen, refuse_company
from torch_ckpt.writer.process import Writer
from torch_ckpt.writer.protocol import Channel, Message, channel_pair
from torch_ckpt.writer.shared_memory import can_outlive

logger = logging.getLogger(__name__)

_BOOT = (
    "import sys; sys.path[:] = [one for one in sys.path if one]; "  # no json.py of this folder's
    "import json; sys.path[:] = json.loads(sys.argv[2]); "
    "from torch_ckpt.writer.process import main; main(int(sys.argv[1]))"
)
_STDERR_LIMIT_BYTES = 4096
_END_S = 5.0
_JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What a cluster sends to every process of a job, writers included, before or when it ends it."""


class WriterClient:
    """One writer, from start to end; a dead one is replaced by a new client.

    `duties` are further options of the writer.

    All callbacks run on the client's own thread. `busy` says whether an answer is due, since the
    time-out counts only then; `overdue` gives a reason to end a writer that answers and does
    not get on.
    """

    def __init__(
        self,
        *,
        root: str,
        rank: int,
        storage_options: Mapping[str, Any] | None,
        duties: Mapping[str, Any],
        timeout_s: float,
        on_event: Callable[[Message], None],
        on_death: Callable[[WriterClient, str], None],
        busy: Callable[[], bool],
        overdue: Callable[[], str | None],
    ) -> None:
        self._timeout_s = timeout_s
        self._on_event, self._on_death = on_event, on_death
        self._busy, self._overdue = busy, overdue
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = -1
        self._attached: dict[int, int] = {}
        self._closing = False
        self.dead: str | None = None
        """Why this writer cannot be used any more."""
        ours, theirs = channel_pair()
        self._channel = Channel(ours)
        served = {"root": root, "rank": rank, "storage_options": storage_options, **duties}
        drop_on_fork(self)
        if can_outlive():
            try:
                self._start_process(theirs, served)
            except BaseException:
                self.drop_in_child()
                theirs.close()
                raise
        else:
            self._start_thread(theirs, served)
        self._monitor = threading.Thread(target=self._watch, name="ckpt-monitor", daemon=True)
        self._monitor.start()

    @property
    def pid(self) -> int | None:
        """The writer's process id; None if it is a thread of this process."""
        return self._process.pid if self._process is not None else None

    def _start_process(self, theirs: socket.socket, served: dict[str, Any]) -> None:
        # Bound here, so that a new trainer finds this writer from the moment it can be an orphan.
        listener = listen(str(served["root"]), int(served["rank"]))
        if listener is None:
            refuse_company(str(served["root"]), int(served["rank"]))
        # A file without a name: a pipe would block an orphan, the trainer's own stderr would
        # keep whoever reads it waiting for the orphan.
        self._stderr = os.memfd_create("torch-ckpt-writer-stderr")
        level = logging.getLogger("torch_ckpt").getEffectiveLevel()
        served = {**served, "trainer": os.getpid(), "log_level": level}
        passed = [theirs, *([listener] if listener is not None else [])]
        served["listener"] = listener.fileno() if listener is not None else None
        # Not on the command line, which everybody on this host can read: options hold credentials.
        self._channel.send(served)
        with contextlib.ExitStack() as closing:
            for end in passed:
                closing.enter_context(end)
            closing.enter_context(_blocked(_JOB_SIGNALS))  # the writer inherits that, for good
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _BOOT,
                    str(theirs.fileno()),
                    json.dumps(_search_path()),
                ],
                pass_fds=[end.fileno() for end in passed],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,  # a signal to the trainer's group must not end it
            )

    def _start_thread(self, theirs: socket.socket, served: dict[str, Any]) -> None:
        logger.warning(
            "this system has no memfd, or refuses it: a thread writes snapshots, and what it has "
            "not committed is lost if this process is killed"
        )
        self._slabs: dict[int, memoryview] = {}
        channel = Channel(theirs)
        writer = Writer(channel, trainer=None, slabs=self._slabs, **served)
        threading.Thread(
            target=_serve_here, args=(writer, channel), name="ckpt-writer", daemon=True
        ).start()

    def attach(self, number: int, version: int, fd: int, size: int, buffer: memoryview) -> None:
        """Let the writer map a slab, unless it has this mapping already."""
        if self._attached.get(number) == version:
            return
        if self._process is None:
            self._slabs[number] = buffer
        else:
            self.send({"op": "slab", "slab": number, "bytes": size}, fds=(fd,))
        self._attached[number] = version

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message.

        Raises:
            OSError: the writer is gone; `on_death` follows.
        """
        self._channel.send(message, fds)

    def _watch(self) -> None:
        try:
            self._hear_out()
        except Exception as error:  # without a watch nobody would ever hear of its jobs again
            logger.exception("the writer of %s cannot be watched any more", os.getpid())
            self._kill(f"its messages could not be handled ({error!r})")
        self._end()

    def _hear_out(self) -> None:
        """Pass on what the writer says until it is gone or has to be ended."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        quiet_s = 0.0
        while True:
            try:
                ready = poll.poll(1000)
                if ready:
                    quiet_s = 0.0
                    message = self._channel.receive()
                    if message is None:
                        break
                    self._dispatch(message)
                    if (reason := self._overdue()) is not None:
                        self._kill(reason)
                        break
                    continue
            except OSError:
                break
            quiet_s = quiet_s + 1.0 if self._closing or self._busy() else 0.0
            if quiet_s >= self._timeout_s:
                self._kill(f"its writer did not answer for {self._timeout_s:g} s and was ended")
                break

    def _dispatch(self, message: Message) -> None:
        if message["event"] == "log":
            logger.log(message["level"], "writer: %s", message["text"])
        elif message["event"] not in ("beat", "ready"):
            self._on_event(message)

    def _kill(self, reason: str) -> None:
        self.dead = reason
        if self._process is not None:
            self._process.kill()  # also ends a stopped process

    def _end(self) -> None:
        """Reap the writer and tell the owner, unless this end was asked for."""
        if self._process is not None:
            code = self._reap(self._process)
            if self.dead is None:
                self.dead = f"its writer ended with code {code}{self._last_words()}"
            stderr, self._stderr = self._stderr, -1  # a forked child must not close it again
            os.close(stderr)
        elif self.dead is None:
            self.dead = "its writer ended"
        if not self._closing:
            self._on_death(self, self.dead)

    def _reap(self, process: subprocess.Popen[bytes]) -> int | None:
        """The exit code; None if it is stuck in the kernel, as on a dead file server."""
        for _ in range(2):
            try:
                return process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()  # it said goodbye: whatever still runs in it must not commit
        return None

    def _last_words(self) -> str:
        size = os.fstat(self._stderr).st_size
        text = os.pread(self._stderr, _STDERR_LIMIT_BYTES, max(0, size - _STDERR_LIMIT_BYTES))
        lines = text.decode("utf-8", "replace").strip().splitlines()
        return f" ({lines[-1]})" if lines else ""

    def close(self) -> None:
        """Let the writer finish what it has, then wait for its end."""
        self._closing = True
        with contextlib.suppress(OSError):  # already gone
            self._channel.send({"op": "close"})
        self._monitor.join()
        self._channel.close()

    def drop_in_child(self) -> None:
        """Forget the writer: it serves the parent, or never came to be."""
        self.dead = "it serves another process"
        self._channel.close()
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1


@contextlib.contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Hold signals off this thread, and off what is started meanwhile for ever.

    A writer that these signals do not end uses the time between them and the kill to finish, and
    ends by itself once its trainer is gone.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _search_path() -> list[str]:
    """Where the writer finds this package, whatever its working directory and environment."""
    found = []
    for entry in sys.path:
        if isinstance(entry, str):  # the import system skips anything else too
            with contextlib.suppress(FileNotFoundError):  # the working directory was removed
                found.append(entry or os.getcwd())
    return found


def _serve_here(writer: Writer, channel: Channel) -> None:
    """The writer's work on a thread; its end of the channel closes as a process's would."""
    try:
        writer.serve()
    finally:
        channel.close()
