"""The place in the data: where each prepared loader is, saved and found again.

Accelerate's loaders tell nobody where they are. Their iterators call `begin`, `end` and the inner
loader's `__iter__` on the instance, and that is where this listens; nothing of a class is changed.

What comes back exactly, in mid-epoch, at the last batch and between epochs: the order of samples of
any sampler that draws from torch's global generator, from its own, or by `set_epoch` (also without
a call of `set_epoch`: the epoch goes on where it was); random augmentation in the main process,
though a batch is read ahead; and in workers, whose batches are read again for that
(`skip="exact"`). Not: random numbers of persistent workers after the first epoch, samplers and
datasets that keep random state elsewhere, and loaders that were never prepared.

Knows prepared loaders. Knows nothing of storage or of the rest of the state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, SkipBatchSampler, skip_first_batches
from torch.utils.data import IterableDataset, TensorDataset

from accelerate_ckpt.moment import give, moment, owners
from accelerate_ckpt.passage import Passage, Replay
from accelerate_ckpt.samplers import Shorter, Signalling

logger = logging.getLogger(__name__)

_MARK = "_ckpt_watch"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run goes on."""

    step: int
    """Optimizer steps taken."""

    epoch: int
    """The epoch to go on with: whole ones that the training loader has been through."""

    batch: int
    """Batches of that epoch that training has had, on each rank; 0 between epochs."""

    generation: str
    """Path or URL of what was loaded."""


class Watch:
    """One prepared loader, and its passages."""

    def __init__(self, loader: Any, places: Places, *, parent: Watch | None = None) -> None:
        self.loader, self._places, self.parent = loader, places, parent
        self.passage: Passage | None = None
        self.pending: Replay | None = None
        """Where a loaded generation was, until a passage begins."""
        self.offset = self.drop = 0
        self.loaded_epoch = 0
        self._signals = False
        self._instrument()

    @property
    def root(self) -> Watch:
        """The watch of the loader that was prepared, where this one passes over batches."""
        return self if self.parent is None else self.parent.root

    @property
    def stateful(self) -> bool:
        """Whether the loader keeps its own place."""
        return bool(getattr(self.loader, "use_stateful_dataloader", False))

    def _instrument(self) -> None:
        loader, base = self.loader, self.loader.base_dataloader
        begin, end = loader.begin, loader.end
        loader.begin = partial(self._begin, begin)
        loader.end = partial(self._end, end)
        base.__iter__ = partial(self._iterate, base.__iter__)
        if isinstance(loader, DataLoaderDispatcher):
            loader._fetch_batches = partial(self._dispatch, loader._fetch_batches)
        else:
            loader._update_state_dict = partial(self._pause, loader._update_state_dict)
        setattr(loader, _MARK, self)
        if self.stateful and self._places.exact:
            base.load_state_dict({})  # so that its first iterator is made like any later one

    # ── what the loader's iterator calls, in this order ───────────────────────────────────────

    def _begin(self, begin: Callable[[], None]) -> None:
        replay, self.pending = self.pending, None
        root, loader, offset = self.root, self.loader, self.offset
        if replay is not None and loader.iteration != root.loaded_epoch:
            replay = None  # set_epoch: another epoch was chosen
        elif replay is not None and self is root and not self.stateful:
            self._say_again(replay)
        drop = self.drop
        if replay is not None and self.stateful and self is root:
            offset = replay.batch
            drop = replay.batch if self._places.exact else 0
        self.passage = root.passage = Passage(loader, offset, drop=drop, replay=replay)
        self.passage.signalled = self._signals and self.passage.replay is not None
        self.passage.began = self._places.steps
        root.pending = None
        begin()

    def _iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        passage = self.passage
        if passage is None:  # the inner loader is iterated without the one around it
            return make()
        ended = passage.replay is not None and passage.replay.ended
        if ended and self.stateful:
            return passage.fetches(lambda: iter(()))  # its own next would be another epoch
        return passage.fetches(make)

    def _pause(self, update: Callable[[], None]) -> None:
        """A batch has been worked on, or the first one read; the next is about to be."""
        if self.passage is not None and not self.passage.exhausted:
            self._places.pause(self)
        update()

    def _dispatch(self, fetch: Callable[..., Any], iterator: Any) -> Any:
        """The same, for a loader of which rank 0 reads for all."""
        passage = self.passage
        if passage is None:
            return fetch(iterator)
        self._places.pause(self)
        passage.before_fetch()
        batch, info = fetch(iterator)
        if info[0] is None:
            passage.at_end()
        else:
            passage.after_fetch()
        return batch, info

    def _end(self, end: Callable[[], None]) -> None:
        passage = self.passage
        if passage is not None and not passage.finished:
            if passage.batch:
                self._places.pause(self)
            passage.finished = True
            root = self.root
            if self is not root or (passage.offset and not passage.fetched):
                # The one around the others has ended an epoch of the loader that was prepared.
                root.loader.iteration = max(root.loader.iteration, passage.epoch + 1)
        end()

    # ── saving and loading ────────────────────────────────────────────────────────────────────

    def state(self) -> dict[str, Any]:
        """Where the loader is."""
        passage, loader = self.passage, self.loader
        if passage is not None and passage.under_way and passage.batch:
            place: dict[str, Any] = {
                "epoch": passage.epoch,
                "batch": passage.batch,
                "ended": passage.exhausted,
                "begin": passage.begin,
                "ahead": passage.ahead,
            }
        else:
            place = {"epoch": int(loader.iteration), "batch": 0, "ended": False}
        place["save"] = moment(loader)
        place["length"] = _length(loader)
        place["sampler"] = [
            {"initial_seed": one.initial_seed, "epoch": one.epoch} for one in seedable(loader)
        ]
        place["own"] = loader.state_dict() if self.stateful else None
        return place

    def load(self, place: dict[str, Any]) -> None:
        """Go there: at once between epochs, else with the next passage."""
        loader = self.loader
        loader.iteration = self.loaded_epoch = place["epoch"]
        self.passage = None
        for one, saved in zip(seedable(loader), place["sampler"], strict=False):
            one.initial_seed, one.epoch = saved["initial_seed"], saved["epoch"]
        if self.stateful and place["own"] is not None:
            # Its own state knows no random state of workers, and no order that the global
            # generator gave: to be exact, it is taken for the plain loader that it also is.
            loader.load_state_dict({} if self._places.exact else place["own"])
            loader.dl_state_dict = place["own"]
        self.pending = None
        if place["batch"]:
            self.pending = Replay(
                batch=place["batch"],
                begin=place["begin"],
                ahead=place["ahead"],
                save=place["save"],
                ended=place["ended"],
            )
        else:
            give(place["save"]["generators"], loader)

    def skip(self, batches: int) -> Any:
        """What `skip_first_batches` gives: the rest of the epoch."""
        replay = self.root.pending
        if replay is not None and replay.batch != batches:
            logger.warning(
                "the generation was saved after batch %d of the epoch, and batch %d is asked for: "
                "the run goes on, and not as the one that was saved",
                replay.batch,
                batches,
            )
            replay = None
        loader = self.loader
        streams = isinstance(loader.dataset, IterableDataset)
        exact = replay is not None and replay.begin is not None
        again = exact and self._places.exact and not streams and _workers_may_draw(loader)
        units = batches
        if replay is not None and isinstance(loader, DataLoaderDispatcher) and not streams:
            # The sampler's batches, of which each round takes one for every rank.
            units = batches * (1 if loader.split_batches else loader.state.num_processes)
        child = skip_first_batches(loader, 0 if again else units)
        watch = Watch(child, self._places, parent=self)
        watch.pending, watch.offset = replay, 0 if streams else self.offset + batches
        watch.drop = units if again else 0
        sampler = _skipping(child)
        if again and sampler is not None:
            sampler.batch_sampler = Shorter(sampler.batch_sampler, batches)
        elif exact and sampler is not None and not loader.num_workers:
            watch._signals = True
            sampler.batch_sampler = Signalling(sampler.batch_sampler, units, watch._passed_over)
        return child

    def _passed_over(self) -> None:
        if self.passage is not None and self.passage.signalled:
            self.passage.passed_over()

    def _say_again(self, replay: Replay) -> None:
        logger.warning(
            "the generation was saved after batch %d of epoch %d, and this epoch begins at batch "
            "0; pass over what training has had with accelerator.skip_first_batches(loader, %d)",
            replay.batch,
            self.loaded_epoch,
            replay.batch,
        )


class Places:
    """The prepared loaders of an Accelerator, as one object with a state for each rank."""

    def __init__(self, loaders: Callable[[], Sequence[Any]], *, exact: bool) -> None:
        self._loaders = loaders
        self.exact = exact
        """Whether batches are read again where only that is exact."""
        self.on_pause: Callable[[], None] = lambda: None
        """Called where training is between two batches, or after an epoch's last."""
        self.steps = 0
        """Optimizer steps taken."""
        self.trained = 0
        """Which loader's batches train."""
        self.loaded: list[dict[str, Any]] | None = None

    def pause(self, watch: Watch) -> None:
        """A loader's batch has been worked on; one that trained, if a step came meanwhile.

        A loader that is begun within a step of training (to validate) has none of its own.
        """
        if watch.passage is not None and watch.passage.began < self.steps:
            self.on_pause()

    def watch(self, loader: Any) -> Watch | None:
        """The watch of a loader, made if need be; None for one that cannot be watched."""
        found = getattr(loader, "__dict__", {}).get(_MARK)
        if found is None and hasattr(loader, "base_dataloader") and hasattr(loader, "begin"):
            found = Watch(loader, self)
        return found

    def watches(self) -> list[Watch | None]:
        """One for each prepared loader, in order."""
        return [self.watch(loader) for loader in self._loaders()]

    def note_training(self) -> None:
        """An optimizer has stepped: whose batch was it? The first loader that is under way."""
        for place, watch in enumerate(self.watches()):
            if watch is not None and watch.passage is not None and watch.passage.under_way:
                self.trained = place
                return

    def state_dict(self) -> dict[str, Any]:
        places = [watch.state() if watch is not None else None for watch in self.watches()]
        return {"loaders": places, "trained": self.trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded, self.trained = state["loaders"], state["trained"]

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], rank: int, world_size: int
    ) -> dict[str, Any]:
        """The place in the data on another number of ranks: after as many samples, rounded down.

        Accelerate deals whole batches to ranks in turn, so the order of samples stays as it was.
        """
        first = states[0]
        moved = []
        for place in first["loaders"]:
            if place is not None and place["batch"]:
                batch = place["batch"] * len(states) // world_size
                place = {**place, "batch": batch, "own": None, "ended": False, "begin": None}
            moved.append(place)
        return {"loaders": moved, "trained": first["trained"]}

    def put_back(self) -> None:
        """Send the loaders to where the loaded generation was."""
        loaded, self.loaded = self.loaded or [], None
        watches = self.watches()
        if len(loaded) != len(watches):
            logger.warning(
                "the generation knows the place in the data of %d loaders, and %d are prepared: "
                "each of these begins as a new one",
                len(loaded),
                len(watches),
            )
            return
        for watch, place in zip(watches, loaded, strict=True):
            if watch is not None and place is not None:
                _check_length(watch.loader, place)
                watch.load(place)

    def training_place(self, loaded: Sequence[dict[str, Any] | None]) -> tuple[int, int]:
        """The epoch and the batch of the loader that trains."""
        place = loaded[self.trained] if self.trained < len(loaded) else None
        return (place["epoch"], place["batch"]) if place is not None else (0, 0)

    def skip(self, loader: Any, batches: int) -> Any:
        """In place of `accelerator.skip_first_batches`."""
        watch = self.watch(loader)
        if watch is None:
            return skip_first_batches(loader, num_batches=batches)
        return watch.skip(batches)


def seedable(loader: Any) -> list[Any]:
    """Samplers that are seeded anew for each epoch."""
    return [one for one in owners(loader) if hasattr(one, "initial_seed") and hasattr(one, "epoch")]


def _skipping(child: Any) -> Any:
    """The sampler that `skip_first_batches` has put around the others."""
    base = child.base_dataloader
    for one in (getattr(base, "batch_sampler", None), getattr(base, "sampler", None)):
        if isinstance(one, SkipBatchSampler):
            return one
    return None


def _workers_may_draw(loader: Any) -> bool:
    """Whether a batch must be read again for the worker to have the random state it had."""
    return bool(loader.num_workers) and not isinstance(loader.dataset, TensorDataset)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _check_length(loader: Any, place: dict[str, Any]) -> None:
    if place["length"] != _length(loader):
        logger.warning(
            "the generation was saved with a loader of %s batches on each rank, and this one has "
            "%s: the order of samples may be another one",
            place["length"],
            _length(loader),
        )
