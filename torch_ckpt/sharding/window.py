"""Memory that a rank shares with the ranks on its host, so that bytes need no socket to reach them.

Anonymous, and reached through `/proc`: nothing is left behind, whoever dies. Ranks that cannot
reach each other this way, on another host or in another container, find that out and use messages.
Knows ranks and /proc. Knows nothing of blocks or tensors.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import torch

from torch_ckpt.sharding.agree import Ranks

_TOKEN_BYTES = 16

Forget = Callable[[], object]
"""Gives pages back to the system; they come again where they are looked at again."""


class Windows:
    """This rank's window, and those of its peers that it can look into."""

    def __init__(self, ranks: Ranks, slots: int, slot_bytes: int) -> None:
        """All ranks call it, each with the slots that it wants; `slot_bytes` must be the same."""
        self._slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._peers: dict[int, int] = {}
        self._file = -1
        self._memory: mmap.mmap | None = None
        token = secrets.token_bytes(_TOKEN_BYTES)
        size = slots * self._slot_bytes
        with suppress(OSError, AttributeError):  # some systems have no memfd, and memory can end
            self._file = os.memfd_create("ckpt-window", os.MFD_CLOEXEC)
            os.ftruncate(self._file, size + mmap.PAGESIZE)
            os.pwrite(self._file, token, size)
            self._memory = mmap.mmap(self._file, size + mmap.PAGESIZE)
        mine = (os.getpid(), self._file, token, size) if self._memory is not None else None
        try:
            for rank, theirs in enumerate(ranks.gather(mine)):
                if theirs is not None and rank != ranks.rank:
                    self._look_for(rank, *theirs)
            row = torch.tensor([[rank in self._peers for rank in range(ranks.world_size)]])
            reach = [found.numpy() for found in ranks.exchange(row.to(torch.int64))]
        except BaseException:
            self.close()
            raise
        self.reached_by = np.concatenate(reach).astype(bool).T
        """Whether a rank's window can be looked into, by that rank and the one that looks."""

    def _look_for(self, rank: int, pid: int, number: int, token: bytes, at: int) -> None:
        """Open the window of a peer, unless something else is there: process ids are per host."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            file = os.open(f"/proc/{pid}/fd/{number}", flags)
        except OSError:
            return
        with suppress(OSError):
            if stat.S_ISREG(os.fstat(file).st_mode) and os.pread(file, _TOKEN_BYTES, at) == token:
                self._peers[rank] = file
                return
        os.close(file)

    def slot(self, number: int) -> memoryview | None:
        """A slot of this rank's window to write to; None if it has no window."""
        if self._memory is None:
            return None
        start = number * self._slot_bytes
        return memoryview(self._memory)[start : start + self._slot_bytes]

    @contextmanager
    def look(self, rank: int, number: int, size: int) -> Iterator[tuple[torch.Tensor, Forget]]:
        """The first bytes of a slot of a peer, and a way to let go of pages looked at.

        What is mapped and was looked at counts as memory of this rank too. Nothing may refer to
        the bytes afterwards.
        """
        mapped = mmap.mmap(
            self._peers[rank],
            size,
            flags=mmap.MAP_PRIVATE,  # torch wants memory that could be written
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=number * self._slot_bytes,
        )
        # Unmapped when the last view of it is gone: closing it here would raise for a view that
        # a traceback still holds.
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=size)
        yield raw, partial(mapped.madvise, mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Let go of it; peers that still look keep what they see."""
        while self._peers:
            os.close(self._peers.popitem()[1])
        self._memory = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
