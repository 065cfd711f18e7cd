"""The façade: one object that saves, loads and resumes one run.

Wires the parts together and checks arguments. Knows nothing that `save`, `load` and `resume` do
not tell it.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import Self

from torch_ckpt.config import (
    Block,
    Config,
    archive_rule,
    check_metrics,
    check_root,
    check_step,
    check_tags,
)
from torch_ckpt.errors import CkptError
from torch_ckpt.exclusive import Exclusive
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.retention import KeepLast, Retention
from torch_ckpt.inline import save_inline
from torch_ckpt.manifest.layout import folder_name
from torch_ckpt.pending import PendingSave
from torch_ckpt.places import Places
from torch_ckpt.resume import Resumer
from torch_ckpt.save import Request, Saver
from torch_ckpt.sharding.agree import Ranks

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves a training run in the background and brings it back after any crash.

    Args:
        root: A folder or fsspec URL for the generations of one run: the primary tier.
        archive: A folder or fsspec URL to which writers promote what is committed, in the
            background; over HTTP it can only be resumed from.
        cache: A folder on each node's own disk for its share of the newest generation.
        keep: Which generations stay after a commit; None never deletes one. With an archive, one
            leaves the root only once the archive has it, or does not want it.
        keep_archive: Which stay in the archive, and so which are promoted; None keeps all.
        permanent_every: The archive also keeps each step that is a multiple of this.
        mode: "sync" returns from every save when it is committed.
        slabs: Snapshots in host memory at once.
        on_busy: What a save does while all slabs are still being written.
        on_error: "raise" lets a failed save end the next one; `wait` and `close` always raise.
        fence: Who completes a copy that goes on behind training: the next step of any optimizer,
            or the caller with `fence()`.
        distributed: None takes part with all ranks where torch.distributed is initialised (then
            every rank makes a checkpointer and saves at the same steps); False is alone.
        writer_timeout_s: A writer that gives no sign of life for so long is replaced.
        commit_timeout_s: A save that is not committed by then is given up.
        agree_timeout_s: How long ranks wait for one another.
        orphan_timeout_s: How long to wait for the writer of a trainer that died.
        allow_pickle: Whether loading may unpickle what had to be pickled.
        storage_options: Passed to the fsspec file system of the root.
        archive_options: The same for the archive.
        archive_timeout_s: How long a writer goes on promoting after `close`, or after a crash.
        bandwidth_limit: Bytes a second that one rank's writer sends to the archive.
        codec: How blocks are stored: "raw"; "zstd", byte planes under zstd; "auto", so where that
            is durable sooner; or these by patterns of tensors' names.
        archive_codec: The same for the archive, where the root has raw ones.
        moments: "fp8" stores optimizers' moments in 8 bits and fewer, with a loss: docs/codecs.md.
        lossy_delta: Stores changes up to this error of theirs, of all tensors or by names.
        incremental: Store only what differs from the generation before, as far as that pays.
        full_every: How many generations may build on one another.
        framework: Names and versions to record.

    Raises:
        ConfigError: an option cannot be used.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        archive: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        keep: Retention | None = KeepLast(3),  # noqa: B008 - frozen
        keep_archive: Retention | Literal["default"] | None = "default",
        permanent_every: int | None = None,
        mode: Literal["async", "sync"] = "async",
        slabs: Literal[1, 2] = 2,
        on_busy: Literal["wait", "skip"] = "wait",
        on_error: Literal["log", "raise"] = "log",
        fence: Literal["optimizer", "manual"] = "optimizer",
        distributed: bool | None = None,
        writer_timeout_s: float = 60.0,
        commit_timeout_s: float = 1800.0,
        agree_timeout_s: float = 300.0,
        orphan_timeout_s: float = 600.0,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        archive_options: Mapping[str, Any] | None = None,
        archive_timeout_s: float = 300.0,
        bandwidth_limit: float | None = None,
        codec: str | Mapping[str, str] = "raw",
        archive_codec: Literal["raw", "zstd", "auto"] = "auto",
        moments: Literal["fp8"] | None = None,
        lossy_delta: float | Mapping[str, float] | None = None,
        incremental: bool = False,
        full_every: int = 8,
        framework: Mapping[str, str] | None = None,
    ) -> None:
        self._config = Config(
            root=check_root(root),
            keep=keep,
            mode=mode,
            slabs=slabs,
            on_busy=on_busy,
            on_error=on_error,
            fence=fence,
            distributed=distributed,
            writer_timeout_s=writer_timeout_s,
            commit_timeout_s=commit_timeout_s,
            agree_timeout_s=agree_timeout_s,
            orphan_timeout_s=orphan_timeout_s,
            allow_pickle=allow_pickle,
            storage_options=dict(storage_options or {}),
            archive=None if archive is None else check_root(archive, "archive"),
            archive_options=dict(archive_options or {}),
            keep_archive=archive_rule(permanent_every, keep_archive),
            archive_timeout_s=archive_timeout_s,
            bandwidth_limit=bandwidth_limit,
            cache=None if cache is None else check_root(cache, "cache"),
            codec=codec,
            archive_codec=archive_codec,
            moments=moments,
            lossy_delta=lossy_delta,
            incremental=incremental,
            full_every=full_every,
            framework={"torch": torch.__version__, **(framework or {})},
        )
        self._places = Places(self._config)
        self._store = self._places.store
        self._ranks = Ranks(distributed, agree_timeout_s)
        self._saver = Saver(self._config, self._store, self._ranks)
        self._resumer = Resumer(self._config, self._places.reach, self._ranks)
        self._exclusive = Exclusive()
        self._hook: Any = None
        atexit.register(self._at_exit)

    def prepare(self, state: Any, *, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Start the writer and touch the slabs' memory, so that the first save is a fast one.

        Returns at once; `resume` does it by itself. Optimizers in the state or in `optimizers`
        that have not stepped yet are counted with the state they will have.
        """
        with self._exclusive.hold():
            self._resumer.arrive()
            self._saver.prepare(state, optimizers)

    def save(
        self,
        state: Any,
        step: int,
        *,
        block: Block | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: Iterable[str] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
        folder: str | None = None,
    ) -> PendingSave:
        """Save a state as the generation of a step, in the background.

        Args:
            state: Tensors, plain values, and anything with `state_dict`/`load_state_dict`, nested
                in dicts, lists and tuples.
            step: The optimizer step.
            block: When to return. "copied", the default: all that may change before the fence is
                copied; what optimizers own is copied while training goes on. "staged": the
                snapshot is complete and the writer has it, so this process may die.
                "committed": the generation exists.
            metrics: Numbers to record; `KeepBest` ranks by them.
            tags: "permanent" exempts the generation from retention.
            optimizers: Optimizers whose parameters and state are in the state without being there
                as objects, such as in a dict a framework made.
            folder: A name for the generation's folder in place of `step-…`; a path or URL puts it
                elsewhere.

        Raises:
            UnsupportedState: something in the state cannot be saved; nothing was written.
            DisagreementError: the ranks do not save the same thing.
            SaveFailed: an earlier save failed, with `on_error="raise"`; or this one, with
                `block="committed"`.
        """
        root, name = self._places.split(
            folder if folder is not None else folder_name(check_step(step))
        )
        request = Request(
            state=state,
            step=check_step(step),
            block=self._config.block(block),
            root=root,
            folder=name,
            metrics=check_metrics(metrics),
            tags=check_tags(tags),
            optimizers=tuple(optimizers),
            named=folder is not None,
        )
        if self._exclusive.interrupts:
            return self._save_inline(request)
        with self._exclusive.hold():
            self._resumer.arrive_together()
            self._set_fence()
            pending = self._saver.save(request)
            pending.settle = self.fence
            if self._ranks.rank == 0:
                pending.reread = lambda: self._places.generation(root, pending.folder)
            if request.block == "committed" and pending.state != "skipped":
                self._saver.wait_committed(pending)
            return pending

    def fence(self) -> None:
        """Complete a copy that goes on behind training; call it before anything changes the state.

        Costs nothing when no copy is under way.
        """
        if not self._exclusive.closed:
            with self._exclusive.hold():
                self._saver.settle()

    def remove(self, folder: str) -> None:
        """Delete a generation once the saves submitted before have committed.

        If the last of them fails, the removal waits for one that commits.
        """
        root, name = self._places.split(folder)
        with self._exclusive.hold():
            self._saver.remove(root, name)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every save is committed or failed.

        Raises:
            SaveFailed: one failed and no earlier call has raised it.
            TimeoutError: some are still running, and go on.
        """
        with self._exclusive.hold():
            self._saver.settle()
            self._saver.handover.wait(timeout_s)
            self._saver.handover.raise_failure()

    def load(
        self,
        into: Any,
        step: int | None = None,
        *,
        strict: bool = True,
        folder: str | None = None,
    ) -> Generation:
        """Fill a structure in place from the newest generation, or from that of a step or folder.

        Tensors keep their storage, `load_state_dict` is called where there is one, any other
        leaf is replaced in its container. If damage is found while reading, tensors may be
        partly filled. With several ranks, all of them call it together: what several need is read
        by one of them and passed on, and an error on one is an error on all.

        Raises:
            GenerationNotFound: there is none; the message says what there is.
            StateMismatch: keys are missing or surplus or tensors do not fit, and `strict` is True.
            IntegrityError: stored bytes are not the ones that were written.
        """
        with self._exclusive.hold():
            self._finish_own_saves()
            root, name = (self._store.url, None) if folder is None else self._places.split(folder)
            reach = self._places.reach_at(root)
            resumer = Resumer(self._config, reach, self._ranks)
            generation = resumer.load(resumer.pick(step, name), into, strict=strict)
            self._saver.forget()
            return generation

    def resume(
        self, state: Any, *, step: int | None = None, strict: bool = True
    ) -> Generation | None:
        """Bring a run back to its newest usable generation; None if there is none yet.

        All ranks get the same one. A damaged one is quarantined, and the one before it tried.
        Going back to a `step` on purpose sets aside what is newer.

        Raises:
            NothingUsable: there are generations, and none can be used.
            GenerationNotFound: there is none of that step.
            RunBusy: another trainer writes this run.
        """
        with self._exclusive.hold():
            self._finish_own_saves()
            wanted = None if step is None else check_step(step)
            generation, apart = self._resumer.resume(state, step=wanted, strict=strict)
            self._saver.go_on_from(generation, apart)
            self._saver.prepare(state, ())
            return generation

    def latest(self) -> Generation | None:
        """The generation that `resume` would try first; loads nothing.

        Raises:
            NothingUsable: there are generations, and none can be used.
        """
        with self._exclusive.hold():
            self._finish_own_saves()
            return self._resumer.newest()

    def set_aside(self, *, newer_than: int) -> list[str]:
        """Leave behind what is newer than a step that training starts from on purpose.

        Those stay and are listed, nothing chooses them by itself, and saves do not replace them.
        `resume(step=...)` does this by itself. All ranks call it together; returns the folders.
        """
        with self._exclusive.hold():
            self._finish_own_saves()
            folders, lent = self._resumer.set_aside(newer_than)
            self._saver.folders.apart |= {*folders, *lent}
            return folders

    def generations(self) -> list[Generation]:
        """All committed generations of all tiers, newest first, also those that are set apart."""
        return self._places.reach.generations()

    @property
    def archive_lag(self) -> int:
        """Saves of this process that are committed and not in the archive yet."""
        return self._saver.handover.archive_lag

    @property
    def committed(self) -> PendingSave | None:
        """The save of this process that committed last."""
        return self._saver.handover.committed

    @property
    def writer_pid(self) -> int | None:
        """The side process; None while there is none."""
        return self._saver.handover.writer_pid

    def close(self) -> None:
        """Finish every save, end the writer, free the slabs.

        Raises:
            SaveFailed: a save failed and no earlier call has raised it.
        """
        with self._exclusive.hold(closing=True):
            if self._exclusive.closed:
                return
            self._exclusive.closed = True
            atexit.unregister(self._at_exit)
            if self._hook is not None:
                self._hook.remove()
            self._saver.close()
            self._ranks.close()
            self._saver.handover.raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CkptError:
            if kind is None:
                raise  # otherwise the caller's own error matters more; this one is in the log

    def _at_exit(self) -> None:
        """A script that ends without `close` still gets its last save committed."""
        if os.getpid() == self._exclusive.pid:
            try:
                self.close()
            except CkptError as error:
                logger.error("at exit: %s", error)

    def _save_inline(self, request: Request) -> PendingSave:
        """A save that interrupts one of our own calls, as a signal handler's does."""
        job, flat, plan = self._saver.inline_job(request)
        pending = save_inline(job, flat, plan, self._places.store_at(request.root), self._config)
        pending.reread = lambda: self._places.generation(request.root, job.folder)
        return pending

    def _finish_own_saves(self) -> None:
        self._resumer.arrive_together()
        self._saver.settle()
        self._saver.handover.wait(None)

    def _set_fence(self) -> None:
        if self._hook is None and self._config.fence == "optimizer":
            self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, *_: object) -> None:
        if os.getpid() == self._exclusive.pid:  # a forked child trains on its own account
            self.fence()
