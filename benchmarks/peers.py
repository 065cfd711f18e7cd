"""The ways to save that are measured: one class each, used as its own documentation says.

Knows how each peer saves, when it calls a save done, and how it loads. Knows nothing of timing.
Imports are inside the classes: a row loads its own peer and nothing else.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch
from job import Job

POLL_S = 0.002


def fsync_tree(folder: Path) -> None:
    """Flush every file under `folder`, and the folders' own entries, to the device."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Peer:
    """One way to save. `save` may return early; `wait` returns when the peer says it is done."""

    title: ClassVar[str]
    persists: ClassVar[bool] = True
    fsyncs: ClassVar[bool] = False
    """Whether "done" includes fsync; where it does not, the benchmark adds it to the wait."""

    def __init__(self, job: Job, root: Path) -> None:
        self.job, self.root = job, root

    def folder(self, step: int) -> Path:
        """Where the save of `step` lives."""
        return self.root / f"step-{step}"

    def save(self, step: int) -> None:
        raise NotImplementedError

    def fence(self) -> None:
        """Called between backward and the update."""

    def wait(self) -> None:
        """Block until the last save is done as the peer sees it; may be called in a thread."""

    def load(self, step: int) -> None:
        """Read the save of `step` as a user of this peer would, or raise."""
        raise NotImplementedError

    def close(self) -> None:
        """End whatever the peer keeps running."""


class BareCopy(Peer):
    """All tensors into one buffer whose pages exist: what no eager save can undercut."""

    title = "bare copy (the floor)"
    persists = False

    def __init__(self, job: Job, root: Path) -> None:
        super().__init__(job, root)
        sizes = [(tensor.nbytes + 63) // 64 * 64 for tensor in job.tensors()]
        self._buffer = torch.zeros(sum(sizes), dtype=torch.uint8).fill_(1)  # touches every page
        self._parts = self._buffer.split(sizes)

    def save(self, step: int) -> None:
        for part, tensor in zip(self._parts, self.job.tensors(), strict=True):
            part[: tensor.nbytes].view(tensor.dtype).copy_(tensor.detach().view(-1))


class TorchSave(Peer):
    title = "torch.save + fsync"
    fsyncs = True

    def save(self, step: int) -> None:
        self.folder(step).mkdir()
        with (self.folder(step) / "state.pt").open("wb") as file:
            torch.save(self.job.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, step: int) -> None:
        torch.load(self.folder(step) / "state.pt", weights_only=True)


class LightningAsync(Peer):
    title = "Lightning AsyncCheckpointIO"

    def __init__(self, job: Job, root: Path) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        super().__init__(job, root)
        done = self._done = threading.Event()

        class Announcing(TorchCheckpointIO):
            def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
                super().save_checkpoint(*args, **kwargs)
                done.set()

        self._io = AsyncCheckpointIO(Announcing())

    def save(self, step: int) -> None:
        self._done.clear()
        state = self.job.state_dict()
        checkpoint = {"state_dict": state["model"], "optimizer_states": [state["optimizer"]]}
        self._io.save_checkpoint(checkpoint, self.folder(step) / "last.ckpt")

    def wait(self) -> None:
        self._done.wait()

    def load(self, step: int) -> None:
        self._io.load_checkpoint(self.folder(step) / "last.ckpt")

    def close(self) -> None:
        self._io.teardown()


class Dcp(Peer):
    """`dcp.save`; with `execution` the same through `dcp.async_save`."""

    title = "dcp.save"
    execution: ClassVar[str | None] = None

    def __init__(self, job: Job, root: Path) -> None:
        import torch.distributed as dist

        super().__init__(job, root)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._future: Future[Any] | None = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        state = self.job.state_dict()
        if self.execution is None:
            dcp.save(state, checkpoint_id=self.folder(step))
            return
        kind = AsyncCheckpointerType(self.execution)
        future = dcp.async_save(
            state, checkpoint_id=self.folder(step), async_checkpointer_type=kind
        )
        if not isinstance(future, Future):
            future = future.upload_completion
        self._future = future

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()

    def load(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.job.state_dict(), checkpoint_id=self.folder(step))

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class DcpThread(Dcp):
    title = "dcp.async_save, thread"
    execution = "thread"


class DcpProcess(Dcp):
    title = "dcp.async_save, process"
    execution = "process"


class TorchCheckpointing(Peer):
    """Its defaults, its staging lock as the fence, and no direct I/O.

    Its unaligned O_DIRECT writes fail with EINVAL on ext4 and XFS.
    """

    title = "torch_checkpointing"

    def __init__(self, job: Job, root: Path) -> None:
        manager = importlib.import_module("torch_checkpointing").CheckpointManager
        files = importlib.import_module("torch_checkpointing.storage.filesystem")

        super().__init__(job, root)
        config = manager.Config.with_async_save()
        config.storage_config = files.LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = manager(config)
        self._manager.prewarm_staging(self.job.state_dict())
        self._future: Future[Any] | None = None

    def save(self, step: int) -> None:
        self._future = self._manager.save(str(self.folder(step)), self.job.state_dict())

    def fence(self) -> None:
        with self._manager.lock():
            pass  # free of waiting from here on: only this thread starts saves

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()

    def load(self, step: int) -> None:
        self._manager.load(str(self.folder(step)), into=self.job.state_dict())

    def close(self) -> None:
        self._manager.close()


class AccelerateState(Peer):
    title = "Accelerate save_state"

    def __init__(self, job: Job, root: Path) -> None:
        from accelerate import Accelerator

        super().__init__(job, root)
        self._accelerator = Accelerator(cpu=True)
        self._accelerator.prepare(job.model, job.optimizer)

    def save(self, step: int) -> None:
        self._accelerator.save_state(str(self.folder(step)))

    def load(self, step: int) -> None:
        self._accelerator.load_state(str(self.folder(step)))


class AccelerateCkpt(Peer):
    """The same script with `attach`."""

    title = "Accelerate with attach"
    fsyncs = True

    def __init__(self, job: Job, root: Path) -> None:
        from accelerate import Accelerator

        from accelerate_ckpt import CheckpointPlugin, attach

        super().__init__(job, root)
        self._accelerator = Accelerator(cpu=True)
        self._accelerator.prepare(job.model, job.optimizer)
        plugin = CheckpointPlugin(root=root, keep="last=2", on_error="raise")
        self._attached = attach(self._accelerator, plugin)
        self._attached.resume()  # as a script does; it makes the slabs ready
        self._pending: Any = None

    def save(self, step: int) -> None:
        self._pending = self._attached.save(self.folder(step))

    def wait(self) -> None:
        # Polled, since PendingSave.wait would complete the copy at once, in place of the fence.
        while self._pending.state in ("copying", "staged"):
            time.sleep(POLL_S)
        self._pending.wait("committed")

    def load(self, step: int) -> None:
        self._attached.load(self.folder(step))

    def close(self) -> None:
        self._attached.close()


PEERS: dict[str, type[Peer]] = {
    "torch-save": TorchSave,
    "lightning-async": LightningAsync,
    "dcp-save": Dcp,
    "dcp-thread": DcpThread,
    "dcp-process": DcpProcess,
    "torch-checkpointing": TorchCheckpointing,
    "accelerate": AccelerateState,
    "accelerate-ckpt": AccelerateCkpt,
}
