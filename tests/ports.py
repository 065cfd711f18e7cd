"""Ports on loopback that nobody else takes between being found free and being listened on."""

from __future__ import annotations

import itertools
import os
import socket

_BELOW_EPHEMERAL = range(12_000, 30_000)
"""The system gives ports from 32768 on to whoever connects or asks for any; none of these."""

_START = os.getpid() * 37 % len(_BELOW_EPHEMERAL)
_order = itertools.cycle([*_BELOW_EPHEMERAL[_START:], *_BELOW_EPHEMERAL[:_START]])


def free_port() -> int:
    """A port that is free now, and that this process has not given out before."""
    for _ in _BELOW_EPHEMERAL:
        port = next(_order)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError("no port is free on 127.0.0.1")
