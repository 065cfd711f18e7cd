"""DCP's StorageReader over generations: any world size, every block verified before it is used.

Knows DCP's load plans and this package's documents. Knows nothing of how a load was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from torch_ckpt.config import check_root
from torch_ckpt.dcp.checkpoint_id import parse_checkpoint_id
from torch_ckpt.dcp.regions import read_boxes
from torch_ckpt.dcp.stored import StoredState
from torch_ckpt.dcp.values import Sources
from torch_ckpt.errors import (
    CkptError,
    ConfigError,
    DisagreementError,
    FormatError,
    PickleRefused,
)
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.choose import choose
from torch_ckpt.staging.objects import pickled
from torch_ckpt.storage.store import Store, open_store


class Reader(StorageReader):
    """Reads generations for `torch.distributed.checkpoint.load`.

    Args:
        root: The folder or URL under which the generations of a run lie.
        allow_pickle: Whether values that were pickled may be unpickled, which can run code.
        storage_options: For the fsspec file system, if the root is a URL.

    `checkpoint_id` of the load is a step, a folder's name, or its path under the root; without one
    the newest generation is read. DCP raises what goes wrong on any rank as its
    `CheckpointException`, whose `failures` hold by rank: GenerationNotFound, IntegrityError (names
    file and tensors), FormatError, PickleRefused (names the key), DisagreementError.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = check_root(root)
        self.allow_pickle = allow_pickle
        self._options = dict(storage_options or {})
        self._wanted: object = None
        self._opened: StoredState | None = None
        self._failure: Exception | None = None
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Take down which generation the next load reads."""
        self._wanted = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is stored in the generation, in DCP's words."""
        wanted, self._wanted = self._wanted, None
        self._opened = self._failure = None
        try:
            store = open_store(self.root, self._options)
            self._opened = StoredState(store, self._generation(store, wanted))
            return self._opened.metadata()
        except (CkptError, OSError) as error:
            # DCP would hide it behind an assertion; `set_up_storage_reader` lets it out.
            self._failure = error
            return Metadata({})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Report what kept the generation from being opened.

        Raises:
            GenerationNotFound: there is none.
            ConfigError: `checkpoint_id` names none.
            FormatError, IntegrityError: its documents cannot be read.
        """
        self._rank = kwargs.get("rank") or 0
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which generation this rank is going to read."""
        return replace(plan, storage_data=self._there.generation.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Make sure that all ranks read the same generation.

        Raises:
            DisagreementError: they do not; names both.
        """
        first = plans[0].storage_data
        for rank, plan in enumerate(plans):
            if plan.storage_data != first:
                raise DisagreementError(
                    f"rank 0 loads step {first[0]} (attempt {first[1]}), rank {rank} step "
                    f"{plan.storage_data[0]} (attempt {plan.storage_data[1]}); "
                    "give all ranks the same checkpoint_id and root"
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan, then hand its other values to the planner.

        Raises:
            IntegrityError: stored bytes are not the ones that were written.
            PickleRefused: a value was pickled, and `allow_pickle` is False.
        """
        there = self._there
        url = there.generation.url
        values = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        keys = [item.storage_index.fqn for item in values]
        self._check_pickles(keys)
        needed = {name for key in keys for name in there.names_behind(key, self._rank)}
        inner = {name: there.empty(name) for name in needed}
        boxes = [box for name, tensor in inner.items() for box in there.whole(name, tensor)]
        targets = [(item, planner.resolve_tensor(item).detach()) for item in tensors]
        boxes += [there.box(item, target) for item, target in targets if target.numel()]
        try:
            read_boxes(boxes)
        except FileNotFoundError as error:
            raise FormatError(file=url, reason=f"lacks a file ({error})") from error
        for item, target in targets:
            planner.commit_tensor(item, target)
        own = there.per_rank(self._rank)
        sources = Sources(url, inner.__getitem__, own, allow_pickle=self.allow_pickle)
        for key, item in zip(keys, values, strict=True):
            planner.load_bytes(item, sources.bytes_for_planner(key, there.keys[key].document))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether an id is a step, a name or a path."""
        return isinstance(checkpoint_id, (int, str, os.PathLike))

    def _generation(self, store: Store, checkpoint_id: object) -> Generation:
        catalog = Catalog(store)
        step = None
        if checkpoint_id is not None:
            wanted = parse_checkpoint_id(checkpoint_id, self.root)
            if wanted.folder is not None:
                return catalog.find(folder=wanted.folder)
            step = wanted.step
        found = choose(catalog.committed(), step)
        return (
            catalog.whole(found[0]) if found else catalog.find(step=step)
        )  # which says what there is

    def _check_pickles(self, keys: list[str]) -> None:
        """Refuse before the first byte is read, naming all of them."""
        if self.allow_pickle:
            return
        there = self._there
        flagged = [
            line
            for key in keys
            for document in there.documents(key, self._rank)
            for line in pickled({key: document})
        ]
        if flagged:
            raise PickleRefused(where=there.generation.url, values=flagged)

    @property
    def _there(self) -> StoredState:
        if self._opened is None:
            raise ConfigError("this Reader has opened nothing; pass it to dcp.load")
        return self._opened
