"""Which ranks' writers live on this node, so that nobody waits for one that is gone.

A coordinator keeps a connection to the socket of each writer that it finds; its end is the message
that the writer ended. Knows sockets. Knows nothing of votes or storage.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from torch_ckpt.writer.orphan import greet


class Neighbours:
    """The writers of other ranks of one run that have been seen on this node."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._seen: dict[int, socket.socket | None] = {}
        """None for one that has ended and was not replaced."""

    def look(self, ranks: Iterable[int]) -> None:
        """Find out who is here. A rank on another node is never seen, and never gone."""
        for rank in ranks:
            if self._seen.get(rank) is None and (found := greet(self._root, rank)) is not None:
                self._seen[rank] = found

    def gone(self, ranks: Iterable[int]) -> frozenset[int]:
        """Those that have been here and are not any more, nor has a new writer come."""
        found = set()
        for rank in ranks:
            if rank not in self._seen:
                continue
            connection = self._seen[rank]
            if connection is None or _ended(connection):
                if connection is not None:
                    connection.close()
                self._seen[rank] = greet(self._root, rank)
            if self._seen[rank] is None:
                found.add(rank)
        return frozenset(found)

    def close(self) -> None:
        """Let go of all connections."""
        for connection in self._seen.values():
            if connection is not None:
                connection.close()
        self._seen.clear()


def _ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):  # what it said of itself when it answered
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
