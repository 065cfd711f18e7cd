"""A slab: one reusable region of host memory that holds a snapshot and outlives the trainer.

Anonymous shared memory (`memfd_create`), mapped once, grown when a state grows, touched ahead
of time so that no copy waits for page faults. Knows bytes. Knows nothing of tensors.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from typing import Any

import torch

from torch_ckpt.writer.forks import drop_on_fork
from torch_ckpt.writer.shared_memory import can_outlive

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_STRIDE_BYTES = 64 << 20
_ROUND_BYTES = 2 << 20


class Slab:
    """Host memory of one snapshot; the trainer maps it, the writer holds its descriptor too."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.fd = os.memfd_create(f"torch-ckpt-{number}") if can_outlive() else -1
        self.bytes = 0
        self.version = 0
        """Counts mappings: views of an older one are void."""
        self._mapping: mmap.mmap | None = None
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._lock = threading.Lock()
        self._prefault: threading.Thread | None = None
        self._closing = False
        drop_on_fork(self)

    @property
    def tensor(self) -> torch.Tensor:
        """The whole slab as bytes."""
        return self._tensor

    @property
    def buffer(self) -> memoryview:
        """The whole slab as a memoryview."""
        return memoryview(self._mapping) if self._mapping is not None else memoryview(b"")

    def reserve(self, size: int, *, pin: bool = False) -> None:
        """Hold at least `size` bytes; contents survive growth."""
        with self._lock:
            if size > self.bytes:
                self._grow(-(-size // _ROUND_BYTES) * _ROUND_BYTES)
            if pin and not self._pinned:
                self._pin()

    def _grow(self, size: int) -> None:
        self._unpin()
        if self.fd >= 0:
            os.ftruncate(self.fd, size)
            self._mapping = mmap.mmap(self.fd, size)
        else:
            before, self._mapping = self.buffer, mmap.mmap(-1, size)
            self._mapping[: len(before)] = before
        self.bytes = size
        self._tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.version += 1

    def prefault(self) -> None:
        """Touch every page from a background thread, once a mapping."""
        if self.bytes and (self._prefault is None or not self._prefault.is_alive()):
            self._prefault = threading.Thread(
                target=self._touch, name=f"ckpt-prefault-{self.number}", daemon=True
            )
            self._prefault.start()

    def _touch(self) -> None:
        tensor = self._tensor  # keeps this mapping alive if the slab grows meanwhile
        address, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel()
        libc = ctypes.CDLL(None, use_errno=True)
        while address < end and not self._closing:
            length = min(_STRIDE_BYTES, end - address)
            # Through ctypes, since mmap.madvise holds the GIL for the whole call.
            if libc.madvise(
                ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE
            ):
                logger.debug("this kernel cannot prefault slabs; the first saves copy slower")
                return
            address += length

    def ready(self, timeout_s: float | None = None) -> bool:
        """Wait for a prefault that is under way."""
        if self._prefault is not None:
            self._prefault.join(timeout_s)
            return not self._prefault.is_alive()
        return True

    def _pin(self) -> None:
        cuda: Any = torch.cuda.cudart()
        result = cuda.cudaHostRegister(self._tensor.data_ptr(), self._tensor.numel(), 0)
        if int(result) != 0:
            logger.warning(
                "slab %d could not be pinned (CUDA error %s); copies from the GPU are slower and "
                "do not overlap",
                self.number,
                result,
            )
        else:
            self._pinned = True

    def _unpin(self) -> None:
        if self._pinned:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self._tensor.data_ptr())
            self._pinned = False

    def close(self) -> None:
        """Give the memory back, as far as this process is concerned."""
        self._closing = True
        self.ready()  # a thread that the interpreter ends in the middle of a call aborts it
        with self._lock:
            self._unpin()
            self.drop_in_child()

    def drop_in_child(self) -> None:
        """Forget mapping and descriptor without touching CUDA: also right in a forked child."""
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._mapping = None  # unmapped when the last view of it dies
        self.bytes = 0
        self.version += 1
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
