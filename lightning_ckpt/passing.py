"""Getting a new iterator past the batches that were already seen: read and dropped, or unread.

Reading them is always exact, since workers then end in the random state they had. Leaving them
unread is exact only where reading draws no random numbers in workers and changes nothing.
Knows torch's loaders, and loops through `Loops`. Knows nothing of what else is restored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal

from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from lightning_ckpt.loops import Loops
from lightning_ckpt.moment import go_back, has_running_workers

logger = logging.getLogger(__name__)

_END = object()


def read_past(loops: Loops, state: dict[str, Any], loaders: list[Any]) -> None:
    """Read and drop the batches that the saved run had seen in this epoch.

    Raises:
        StopIteration: the data ends before.
    """
    fetcher, count, fetched = loops.fetcher, state["batches"], state["fetched"]
    if count == 0 and not fetched:
        return
    if state["iterated"] is not None and any(map(has_running_workers, loops.train_loaders)):
        logger.warning(
            "Persistent workers have lived through epochs that are not read again: the order of "
            "samples is exact, random numbers drawn in the workers are not"
        )
    if fetched is not None:  # the step itself fetches: Lightning's dataloader_iter
        for _ in range(fetched):
            next(fetcher.iterator_wrapper)
        return
    again = {entry["call"]: entry for entry in state["again"]}
    if len(loops.train_loaders) == 1:
        for _ in range(count - 1):
            next(fetcher)
    else:
        _read_past_several(loops.iteration, count - 1, again, loaders)
        loops.pass_unread(count - 1, last=False)
    if count - 1 in again:
        go_back(again[count - 1]["moment"], loaders)
    elif state["ahead"] is not None:
        go_back(state["ahead"], loaders)
    next(fetcher)


def start_validation_workers(loops: Loops, running: list[bool]) -> None:
    """Have the validation loaders, and running workers, where the saved run had them."""
    if running and not loops.validation_loaders:
        loops.make_validation_loaders()
    for loader, runs in zip(loops.validation_loaders, running, strict=False):
        if runs and not has_running_workers(loader):
            iter(loader)  # starting them draws a number, which the saved run had drawn


def latest(again: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the times that loaders began anew, those that are the last one of some loader."""
    last = {index: entry["call"] for entry in again for index in entry["loaders"]}
    return [entry for entry in again if entry["call"] in last.values()]


def _read_past_several(
    iteration: Any, count: int, again: dict[int, dict[str, Any]], loaders: list[Any]
) -> None:
    """Read and drop `count` batches of several combined loaders, some of which began anew.

    Only the last time that each one began anew is in `again`, so one that is exhausted before it
    did so the last time stays at its end until then.
    """
    at_end = [False] * len(iteration.iterators)
    for call in range(count):
        entry = again.get(call)
        if entry is not None:
            go_back(entry["moment"], loaders)
        for index in range(len(iteration.iterators)):
            if entry is not None and index in entry["loaders"]:
                iteration.iterators[index] = iter(iteration.iterables[index])
                iteration._consumed[index], at_end[index] = True, False
            if not at_end[index]:
                at_end[index] = next(iteration.iterators[index], _END) is _END


def may_leave_unread(loader: Any, skip: Literal["exact", "fast"]) -> bool:
    """Whether this loader can reach a later batch without reading those before it.

    "fast" says yes for every map-style loader; "exact" only where nothing of the user's runs
    when a batch is read: torch's own datasets of tensors, under torch's own collation.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if loader.persistent_workers or hasattr(loader, "load_state_dict"):
        return False  # these keep an iterator of their own, which has its own index sampler
    return skip == "fast" or (_is_pure(loader.dataset) and loader.collate_fn is default_collate)


def _is_pure(dataset: Any) -> bool:
    if type(dataset) is TensorDataset:
        return True
    if type(dataset) is Subset:
        return _is_pure(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_is_pure(item) for item in dataset.datasets)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(
            _is_pure(item) for item in (parts.values() if isinstance(parts, dict) else parts)
        )
    return False


def fastforward(
    loaders: list[Any], state: dict[str, Any], skip: Literal["exact", "fast"]
) -> list[Fastforward]:
    """What has the next iterator begin after the batches already seen, where that is allowed."""
    if (
        state["batches"] > 0
        and not state["again"]
        and len(loaders) == 1
        and state["fetched"] is None
        and state["phase"] not in ("boundary", "epoch_end")
        and may_leave_unread(loaders[0], skip)
    ):
        return [Fastforward(loaders[0], state["batches"])]
    return []


class Fastforward:
    """Stands in for a loader's index sampler while its iterator is made, and skips its beginning.

    Sampling stays as lazy as it was: `advance` says when.
    """

    def __init__(self, loader: Any, count: int) -> None:
        self._loader = loader
        self._name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        self._inner = getattr(loader, self._name)
        self._count = count
        self._iterator: Iterator[Any] | None = None
        vars(loader)[self._name] = self  # DataLoader refuses the plain assignment

    def remove(self) -> None:
        """Give the loader its own sampler back; iterators made meanwhile keep this one."""
        vars(self._loader)[self._name] = self._inner

    def advance(self) -> None:
        """Draw the indices of the batches to skip, once."""
        if self._iterator is None:
            self._iterator = iter(self._inner)
            for _ in range(self._count):
                next(self._iterator, None)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.advance()
        if self._iterator is None:
            raise StopIteration
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
