"""One save on its way through an encoder: what it wrote, and whether its slab stays there.

Knows the encoder. Knows nothing of votes or processes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

from torch_ckpt.manifest.blocks import Placed
from torch_ckpt.manifest.schema import Manifest
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.encode import Encoder
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.shard import Written, write_shard


class Share:
    """One job on its way through an encoder, or past it where there is none."""

    def __init__(self, encoder: Encoder | None, *, late: bool) -> None:
        """`late` says that training had to wait for storage."""
        self.encoder, self._late = encoder, late
        self._job: tuple[Job, memoryview, Written] | None = None
        self.holds = False
        """Whether the slab stays with the encoder."""

    def write(
        self, job: Job, placed: list[Placed], slab: memoryview, store: Store, pool: Executor
    ) -> Written:
        """What `persist` is given to write with."""
        if self.encoder is None:
            return write_shard(job, placed, slab, store, pool)
        written = self.encoder.write(job, placed, slab, store, pool, late=self._late)
        self._job = job, slab, written
        return written

    def keep(self, placed: list[Placed], done: Callable[[], None]) -> None:
        """The shard is durable; `done` gives the slab back."""
        if self.encoder is None or self._job is None:
            done()  # a second name has no bytes of its own
            return
        job, slab, written = self._job
        self.holds = self.encoder.remember(job, placed, slab, written, done)

    def anchors_next(self, job: Job, manifest: Manifest) -> bool:
        """Whether the save after this one may lose something."""
        if self.encoder is None:
            return False
        return self.encoder.anchors_next(job, manifest if job.rank == 0 else None)

    def failed(self) -> None:
        """The save did not commit: nothing may build on it."""
        self.holds = False
        if self.encoder is not None:
            self.encoder.forget()
