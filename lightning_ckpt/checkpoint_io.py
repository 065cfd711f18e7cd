"""The plugin for `Trainer(plugins=[...])` and `Fabric(plugins=[...])`: checkpoints as generations.

Whatever Lightning saves through it (ModelCheckpoint, `save_checkpoint`, Fabric) is copied to
host memory and committed in the background. It is handed a dictionary and never an optimizer, so
it cannot know which tensors stay as they are until the next step: everything is copied before
`save_checkpoint` returns. The overlapped copy is what `CheckpointCallback` gives. Knows paths and
the engine. Knows nothing of trainers or ranks other than its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_ckpt import twins
from lightning_ckpt.callers import (
    inside_running_trainer,
    inside_sharded_strategy,
    inside_signal_handler,
)
from lightning_ckpt.lost import read_lost
from lightning_ckpt.paths import TIER_OPTIONS, as_url, is_remote, is_scratch, resolved, split
from lightning_ckpt.plain_file import is_file, remove_file, write_file
from lightning_ckpt.reading import MANIFEST, MapLocation, is_generation, read_checkpoint
from torch_ckpt import (
    Checkpointer,
    CkptError,
    GenerationNotFound,
    NothingUsable,
    PendingSave,
    RunBusy,
)

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
else:
    CheckpointIO = twins.checkpoint_io_bases()[0]

logger = logging.getLogger(__name__)

_STEP_KEYS = ("global_step", "step", "iteration", "iter")
_POLL_S = 0.05


def _on_the_host(storage: torch.UntypedStorage, _location: str) -> torch.UntypedStorage:
    return storage


class TwoBufferCheckpointIO(CheckpointIO):
    """Saves in the background through two buffers; every checkpoint is complete or not there.

    Args:
        mode: "sync" makes every save durable before it returns.
        slabs: how many snapshots may wait in memory; one more save waits for a free one.
        on_error: "raise" lets a failed save stop training at the next save or at the end.
        writer_timeout_s: how long a silent writer is believed to be alive.
        commit_timeout_s: how long a save may take to become durable.
        allow_pickle: whether loads that leave `weights_only` open may unpickle custom objects.
        storage_options: for fsspec, where checkpoints are not on this host's file system.
        tiers: where checkpoints go on to: `archive`, `cache`, `keep_archive`, `archive_options` and
            the others of `torch_ckpt.Checkpointer`; for those that lie in one folder. And `codec`.
    """

    def __init__(
        self,
        *,
        mode: Literal["async", "sync"] = "async",
        slabs: Literal[1, 2] = 2,
        on_error: Literal["log", "raise"] = "log",
        writer_timeout_s: float = 60.0,
        commit_timeout_s: float = 1800.0,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        **tiers: Any,
    ) -> None:
        # Only a folder that nobody saves into again can be built on, so nothing more of encoding.
        if unknown := tiers.keys() - {*TIER_OPTIONS, "codec", "archive_codec"}:
            raise TypeError(f"TwoBufferCheckpointIO has no option {', '.join(sorted(unknown))}")
        self._options: dict[str, Any] = {
            "mode": mode,
            "slabs": slabs,
            "on_error": on_error,
            "writer_timeout_s": writer_timeout_s,
            "commit_timeout_s": commit_timeout_s,
            "allow_pickle": allow_pickle,
            "storage_options": dict(storage_options) if storage_options else None,
            **{k: as_url(v) if v and k in ("archive", "cache") else v for k, v in tiers.items()},
        }
        self._forget()
        Checkpointer(os.getcwd(), **self._engine_options()).close()  # refuses bad options now
        for base in twins.checkpoint_io_bases():
            base.register(type(self))  # each twin accepts only its own class

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Take a snapshot of `checkpoint` and commit it at `path` in the background.

        Lightning's scratch files, saves in a signal handler, saves after the trainer has ended and
        those of sharded strategies become ordinary `.ckpt` files, durable on return.

        Raises:
            UnsupportedState: something in it cannot be saved; nothing was written.
        """
        if storage_options not in (None, self._options["storage_options"]):
            raise TypeError(
                "pass storage_options to TwoBufferCheckpointIO(storage_options=...); one plugin "
                "writes with one set of them"
            )
        url = as_url(path)
        if self._wants_plain_file(url):
            # Touches no engine: a signal may have interrupted it anywhere.
            write_file(checkpoint, url)
            return
        engine, folder = self._engine_for(url)
        self._last = self._pending[url] = engine.save(
            checkpoint, self._step_of(checkpoint), block="staged", folder=folder
        )
        if not is_remote(url):
            # At once: Lightning looks for a name before it uses it, and links to it.
            os.makedirs(url, exist_ok=True)
        self._remove_files()

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: MapLocation = _on_the_host,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a generation or an ordinary `.ckpt` file, after the saves submitted before.

        One that is gone from its folder is read from the archive, if that has its name.

        Raises:
            GenerationNotFound: there is none, or its save failed.
            PickleRefused: it holds custom objects and `weights_only` is not False.
        """
        self.wait()
        url = self._whole(as_url(path))
        options: dict[str, Any] = {
            "map_location": map_location,
            "weights_only": weights_only,
            "allow_pickle": self._options["allow_pickle"],
        }
        try:
            return read_checkpoint(url, storage_options=self._options["storage_options"], **options)
        except GenerationNotFound as missing:
            return read_lost(url, self._options, missing, alone=_is_alone(), **options)

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once every save submitted before is committed."""
        url = as_url(path)
        if not is_remote(url) and os.path.islink(url):
            os.unlink(url)
        elif url in self._pending or not (is_file(url) or _is_foreign_folder(url)):
            engine, folder = self._engine_for(url)
            engine.remove(folder)
            self._pending.pop(url, None)
        elif is_scratch(url):
            remove_file(url)
        else:
            self._doomed.append((self._last, url))
            self._remove_files()

    def wait(self) -> None:
        """Block until every save so far is committed, or has failed and is logged."""
        if self._engine is not None:
            try:
                self._engine.wait()
            except CkptError as error:
                if self._options["on_error"] == "raise":
                    raise
                logger.error("%s", error)
        self._pending = {
            url: save for url, save in self._pending.items() if save.state != "committed"
        }
        self._remove_files()

    @override
    def teardown(self) -> None:
        """Make everything durable and free the buffers; the plugin can be used again."""
        try:
            self.wait()
        finally:
            engine = self._engine
            self._forget()
            self._ended = True
            if engine is not None:
                engine.close()

    def _wants_plain_file(self, url: str) -> bool:
        if is_scratch(url) or inside_signal_handler():
            return True
        if inside_sharded_strategy():
            logger.warning(
                "%s is written as an ordinary file before the save returns, since the strategy "
                "does not read through a CheckpointIO; CheckpointCallback saves and resumes "
                "ModelParallelStrategy in the background",
                url,
            )
            return True
        if is_remote(url) or not os.path.lexists(url):
            return self._ended and not inside_running_trainer()
        if os.path.isfile(url):
            logger.warning(
                "%s is an ordinary file and stays one, written before the save returns; "
                "move it away to have it saved in the background",
                url,
            )
            return True
        return False

    def _engine_for(self, url: str) -> tuple[Checkpointer, str]:
        """The engine, and what it calls the folder at `url`."""
        root, name = split(url)
        if self._engine is None:
            self._root = root
            self._engine = Checkpointer(root, **self._engine_options())
        return self._engine, name if root == self._root else url

    def _engine_options(self) -> dict[str, Any]:
        # ModelCheckpoint says what stays, and only rank 0 is asked to save.
        return {**self._options, "keep": None, "distributed": False, "fence": "manual"}

    def _step_of(self, checkpoint: Mapping[str, Any]) -> int:
        for key in _STEP_KEYS:
            step = checkpoint.get(key)
            if type(step) is int and step >= 0:
                return step
        self._saves += 1
        return self._saves

    def _whole(self, url: str) -> str:
        """What to read for `url`, once whoever is still writing it has finished."""
        target = resolved(url)
        if is_remote(target) or is_file(target) or _is_foreign_folder(target):
            return target
        if _rank() > 0:
            self._await_rank_zero(target)
            return target
        with Checkpointer(split(target)[0], **self._engine_options()) as other:
            newest = None
            # A trainer that lives: reading disturbs nobody. Nothing usable: reading will say why.
            with contextlib.suppress(RunBusy, NothingUsable):
                newest = other.latest()  # after the writer of a trainer that died
        if target == url or newest is None or is_generation(target):
            return target
        logger.warning(
            "%s links to %s, which was never committed; %s is read instead", url, target, newest.url
        )
        return newest.url

    def _await_rank_zero(self, url: str) -> None:
        deadline = time.monotonic() + self._options["commit_timeout_s"]
        while os.path.isdir(url) and not is_generation(url) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _remove_files(self) -> None:
        """Remove ordinary checkpoints whose successors are committed."""
        left = []
        for save, url in self._doomed:
            if save is None or save.state == "committed":
                _remove_any(url)
            elif save.state in ("failed", "skipped"):
                logger.warning("%s is kept: the save that was to replace it failed", url)
            else:
                left.append((save, url))
        self._doomed = left

    def _forget(self) -> None:
        self._engine: Checkpointer | None = None
        self._root = ""
        self._pending: dict[str, PendingSave] = {}
        self._last: PendingSave | None = None
        self._doomed: list[tuple[PendingSave | None, str]] = []
        self._saves = 0
        self._ended = False

    def __getstate__(self) -> dict[str, Any]:
        """For `ddp_spawn`: the options travel, the engine stays."""
        return {"_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._options = state["_options"]
        self._forget()
        for base in twins.checkpoint_io_bases():
            base.register(type(self))


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return 0


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _is_foreign_folder(url: str) -> bool:
    """Whether this is a folder that no save of ours made, such as a sharded checkpoint."""
    if is_remote(url) or not os.path.isdir(url):
        return False
    names = os.listdir(url)
    return MANIFEST not in names and any(name in (".metadata", "meta.pt") for name in names)


def _remove_any(url: str) -> None:
    twins.torch_checkpoint_io().remove_checkpoint(url)
