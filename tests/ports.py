"""Ports on loopback that nobody else takes between being found free and being listened on."""

from __future__ import annotations

import itertools
import os
import random
import re
import socket

_BELOW_EPHEMERAL = range(30_100, 32_700)
"""The system gives ports from 32768 on to whoever connects or asks for any; below these are the
servers of the object store's tests."""
_WORKERS = 8


def _own() -> range:
    """The share of this test worker, which runs one test at a time, and of what it starts."""
    found = re.search(r"\d+", os.environ.get("PYTEST_XDIST_WORKER", ""))
    number = int(found[0]) % _WORKERS if found else 0
    count = len(_BELOW_EPHEMERAL) // _WORKERS
    return _BELOW_EPHEMERAL[number * count : (number + 1) * count]


_start = random.SystemRandom().randrange(len(_own()))  # another session runs on this machine, too
_order = itertools.cycle([*_own()[_start:], *_own()[:_start]])


def free_port() -> int:
    """A port that is free now, and that this process has not given out before."""
    for _ in _own():
        port = next(_order)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError("no port is free on 127.0.0.1")
