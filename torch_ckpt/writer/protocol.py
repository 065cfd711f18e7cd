"""What trainer and writer say to each other: small JSON messages and file descriptors.

Everything large (layout, objects, tensors) travels in a slab, so a message always fits the
socket and no side can hang the other by not reading. Knows sockets. Knows nothing of what the
messages mean.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_LIMIT_BYTES = 64 << 10
_MAX_FDS = 4


class Channel:
    """One end of the conversation. One thread receives; any may send."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        """For `poll`."""
        return self._socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one message whole, with its descriptors.

        Raises:
            OSError: the other side is gone.
        """
        body = json.dumps(message, separators=(",", ":")).encode("ascii")
        socket.send_fds(self._socket, [body], list(fds))

    def offer(self, message: Message) -> bool:
        """Send if that needs no waiting; False if the other side does not read or is gone."""
        body = json.dumps(message, separators=(",", ":")).encode("ascii")
        try:
            self._socket.send(body, socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """The next message, waiting for it; None when the other side is gone and all was read."""
        for _ in range(2):
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, _LIMIT_BYTES, _MAX_FDS)
            except ConnectionResetError:
                # Said once, and before what is still queued, if the other side died with unread
                # messages of ours. What it had sent before must not be lost with it.
                continue
            except BrokenPipeError:
                break
            self._fds.extend(fds)
            return json.loads(data) if data else None
        return None

    def take_fd(self) -> int:
        """The oldest received descriptor not taken yet; the caller owns it."""
        return self._fds.popleft()

    def close(self) -> None:
        """Close the socket and descriptors nobody took."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.popleft())


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that keep message boundaries."""
    kind = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
    return socket.socketpair(socket.AF_UNIX, kind)
