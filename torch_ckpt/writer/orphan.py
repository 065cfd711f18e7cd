"""How a new trainer finds a writer that still finishes what a dead trainer left.

A writer listens on an abstract socket named after run and rank: no file, no port, and gone with
the process however it ends. Whoever connects is told what the writer does, and sees the end of
the connection when the writer ends. Node-local, as writers are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import sys
import time
from typing import Any, Literal

from torch_ckpt.errors import RunBusy
from torch_ckpt.storage.spelling import place_of

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
_ASK_AGAIN_S = 0.1
_HURRY = b"hurry"
_TIER = "\ntier"
_DYING_S = 3.0
"""A trainer that was killed a moment ago can look alive to its writer for so long."""


def address(root: str, rank: int, kind: str = "") -> str:
    """The abstract socket of a run's writer on this node, however the root is spelt."""
    who = f"{os.getuid()}\n{place_of(root)}\n{rank}{kind}"
    key = hashlib.sha256(who.encode(errors="surrogateescape")).hexdigest()[:24]
    return f"\0torch-ckpt-{key}"


def listen(root: str, rank: int) -> socket.socket | None:
    """Claim the address; None if another writer has it or this system has no such sockets."""
    return _bound(address(root, rank))


def claim_tier(place: str, rank: int) -> socket.socket | None:
    """Show, while the socket is open, that a writer sends files to an archive or a cache.

    At an address of its own: whoever reads that tier as a root waits for nobody.
    """
    return _bound(address(place, rank, _TIER))


def is_sent_to(place: str, rank: int) -> bool:
    """Whether a writer on this node sends files of a rank to an archive or a cache."""
    if not sys.platform.startswith("linux"):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(address(place, rank, _TIER))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # nobody answers there, so its queue of callers may be full
            return True
    return True


def _bound(name: str) -> socket.socket | None:
    if not sys.platform.startswith("linux"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(16)
    except OSError:
        listener.close()
        return None
    listener.setblocking(False)
    return listener


def tell(listener: socket.socket, status: dict[str, Any]) -> socket.socket | None:
    """Answer one caller; the connection is kept, since its end is the message that we ended."""
    try:
        caller, _ = listener.accept()
    except OSError:
        return None
    caller.setblocking(False)
    try:
        caller.send(json.dumps(status).encode("ascii"))
    except OSError:
        caller.close()
        return None
    return caller


def is_hurried(caller: socket.socket) -> bool:
    """Whether who called waits for this writer to end, rather than only watching it."""
    try:
        return caller.recv(len(_HURRY), socket.MSG_PEEK) == _HURRY
    except OSError:
        return False


def writer_of(root: str, rank: int) -> int | None:
    """The process that writes for one rank of a run; 0 if it does not say, None without one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        answer = _ask(caller, root, rank)
    return answer["writer"] if isinstance(answer, dict) else answer


def greet(root: str, rank: int) -> socket.socket | None:
    """A connection that ends with the writer of one rank of a run; None without one here."""
    if not sys.platform.startswith("linux"):
        return None
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    caller.setblocking(False)
    try:
        caller.connect(address(root, rank))
    except OSError:
        caller.close()
        return None
    return caller


def refuse_company(root: str, rank: int) -> None:
    """Refuse to write beside another living trainer that was faster to claim the address.

    Raises:
        RunBusy: there is one.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        answer = _ask(caller, root, rank)
    if isinstance(answer, dict) and answer["trainer"] != os.getpid():
        _check(answer, root, rank, 1.0, 0.0)


def await_orphan(root: str, rank: int, timeout_s: float) -> None:
    """Return once no writer of a dead trainer works on this run and rank.

    A writer of this very process is not waited for.

    Raises:
        RunBusy: another living trainer writes the same run, or the orphan needs too long.
    """
    Orphan(root, rank, timeout_s).gone(timeout_s)


class Orphan:
    """The wait for one writer, in as many pieces as the caller wants."""

    def __init__(self, root: str, rank: int, timeout_s: float) -> None:
        self._root, self._rank, self._timeout_s = root, rank, timeout_s
        self._began = time.monotonic()
        self._said = False

    def gone(self, within_s: float) -> bool:
        """Whether no writer of a dead trainer works on this run and rank, at most so much later.

        Raises:
            RunBusy: as `await_orphan`.
        """
        until = time.monotonic() + within_s
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
                answer = _ask(caller, self._root, self._rank)
                if answer is None:
                    return True
                status = answer if isinstance(answer, dict) else None
                if status is not None and status["trainer"] == os.getpid() and status["alive"]:
                    return True
                now = time.monotonic()
                left = self._began + self._timeout_s - now
                dying = status is not None and status["alive"] and now - self._began < _DYING_S
                if not dying:
                    _check(status, self._root, self._rank, left, self._timeout_s)
                if now >= until:
                    return False
                if dying or status is None:
                    time.sleep(_ASK_AGAIN_S)
                    continue
                self._say(status)
                with contextlib.suppress(OSError):  # what it does beyond saves can be left to us
                    caller.send(_HURRY)
                _await_end(caller, min(left, until - now, 1.0))

    def _say(self, status: dict[str, Any]) -> None:
        if not self._said:
            self._said = True
            logger.info(
                "waiting for process %s, which still writes step %s for a trainer that ended",
                status["writer"],
                status["step"],
            )


def _check(
    status: dict[str, Any] | None, root: str, rank: int, left_s: float, timeout_s: float
) -> None:
    if status is not None and status["alive"]:
        raise RunBusy(
            f"process {status['trainer']} is training and saving to {root} as rank {rank}; end it "
            "first, or give this run a folder of its own"
        )
    if left_s <= 0:
        raise RunBusy(
            f"the writer of an earlier trainer of {root} (rank {rank}) has not finished within "
            f"{timeout_s:g} s; end {_named(status)} if it hangs, then start again"
        )


def _ask(caller: socket.socket, root: str, rank: int) -> dict[str, Any] | Literal[0] | None:
    """What a writer says of itself; 0 if it does not answer, None if there is none."""
    if not sys.platform.startswith("linux"):
        return None
    caller.settimeout(_ANSWER_S)
    try:
        caller.connect(address(root, rank))
    except (ConnectionRefusedError, FileNotFoundError):
        return None
    except OSError:  # its queue of callers is full, or it is stopped
        return 0
    return _hear(caller) or 0


def _named(status: dict[str, Any] | None) -> str:
    return f"process {status['writer']}" if status is not None else "that process, which is stopped"


def _hear(caller: socket.socket) -> dict[str, Any] | None:
    try:
        data = caller.recv(4096)
        return json.loads(data) if data else None
    except (OSError, ValueError):
        return None


def _await_end(caller: socket.socket, timeout_s: float) -> None:
    caller.settimeout(timeout_s)
    try:
        caller.recv(1)
    except OSError:
        return
