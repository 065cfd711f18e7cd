"""One passage through a prepared loader: how far it is, and the random state on its way.

    passage = Passage(loader, 0, drop=0, replay=None) # when the loader's iterator is about to be
    iterator = passage.fetches(make)                   # made, and the iterator itself

Accelerate's loaders are one batch ahead: the batch after the one that training works on has been
read before training gets the first. So a save notes the random state before that read, and a
passage that goes on where a save was (`replay`) makes its iterator under the random state that
made the first one, reads the batch that was ahead under the state it was read in, and puts the
state of the save back before anything else is read or trained.

Knows loaders and random states. Knows nothing of what is saved.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from typing_extensions import Self, override

from accelerate_ckpt.moment import Moment, go_back, moment


class Replay:
    """Where a save was within an epoch, and how a new passage gets there."""

    def __init__(
        self, *, batch: int, begin: Moment | None, ahead: Moment | None, save: Moment, ended: bool
    ) -> None:
        """Args:
        begin: None where another number of ranks had saved: the place is found, and the random
            state stays what it is.
        """
        self.batch, self.begin, self.ahead, self.save = batch, begin, ahead, save
        self.ended = ended
        """Whether the batch at the save was the last of its epoch."""


class Passage:
    """One time through a loader, from its first batch or from a later one."""

    def __init__(self, loader: Any, offset: int, *, drop: int, replay: Replay | None) -> None:
        """Args:
        offset: batches of the epoch that this passage does not give out.
        drop: how many of these it has to read and throw away.
        """
        if replay is not None and replay.begin is None:
            replay = None
        self.loader, self.offset, self.drop, self.replay = loader, offset, drop, replay
        self.epoch = int(loader.iteration)
        self.began = 0
        """Optimizer steps before it."""
        self.fetched = 0
        """Batches read so far, one more than are given out unless it is exhausted."""
        self.exhausted = False
        self.finished = False
        """Whether whoever iterates came back after the last batch."""
        self.begin: Moment | None = None
        self.signalled = False
        """Whether the sampler says when it has passed over batches, by `passed_over`."""
        self.dispatches = hasattr(loader, "_fetch_batches")
        """Whether rank 0 reads for all ranks, several batches at a time."""
        self._reads_here = not getattr(loader, "num_workers", 0)
        self._ahead: deque[Moment] = deque(maxlen=1)
        self._iterator: weakref.ref[Any] | None = None

    @property
    def under_way(self) -> bool:
        """Whether it was begun and neither ended nor given up (by a `break`)."""
        alive = self._iterator is not None and self._iterator() is not None
        return alive and not self.finished

    @property
    def batch(self) -> int:
        """Batches of the epoch that training has had, or has in hand."""
        last = self.exhausted or (self.dispatches and self.loader.end_of_dataloader)
        return self.offset + max(0, self.fetched - (0 if last else 1))

    @property
    def ahead(self) -> Moment | None:
        """The random state before the batch was read that training gets next."""
        return self._ahead[-1] if self._ahead and not self.exhausted else None

    def fetches(self, make: Callable[[], Iterator[Any]]) -> Kept:
        """The loader's own iterator, made under the right random state, and counted."""
        if self.replay is not None and self.replay.begin is not None:
            go_back(self.replay.begin, self.loader)
            self.begin = self.replay.begin
        else:
            self.begin = moment(self.loader)
        fetches = (Kept if self.dispatches else Fetches)(self, make())
        self._iterator = weakref.ref(fetches)
        return fetches

    def before_fetch(self) -> None:
        """Whatever is to happen before the loader reads a batch that is wanted."""
        if not self.signalled:
            self._read_ahead()

    def passed_over(self) -> None:
        """The sampler has drawn what it gives for batches that are not read; a read follows."""
        self.signalled = False
        self._read_ahead()

    def _read_ahead(self) -> None:
        replay = self.replay
        if replay is not None and self._due(replay, done=False) and replay.ahead is not None:
            go_back(replay.ahead, self.loader)
        if self._reads_here:
            self._ahead.append(moment(self.loader))

    def after_fetch(self) -> None:
        """Whatever is to happen once it has."""
        self.fetched += 1
        replay = self.replay
        if replay is not None and self._due(replay, done=True):
            self.replay = None
            go_back(replay.save, self.loader)

    def at_end(self) -> None:
        """The loader has nothing more."""
        self.exhausted = True
        if self.replay is not None:
            replay, self.replay = self.replay, None
            go_back(replay.save, self.loader)

    def _due(self, replay: Replay, *, done: bool) -> bool:
        """Whether the batch that was ahead of the save is the one being read."""
        return self.offset + self.fetched - int(done) == replay.batch


class Kept:
    """The iterator of a loader: drops what is not wanted, and by being alive says that the
    passage goes on."""

    def __init__(self, passage: Passage, inner: Iterator[Any]) -> None:
        self._passage, self._inner = passage, inner

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while self._passage.drop:
            self._passage.drop -= 1
            next(self._inner)
        return next(self._inner)


class Fetches(Kept):
    """The same, counted; the iterator of a loader that reads its batches one by one."""

    @override
    def __next__(self) -> Any:
        passage = self._passage
        try:
            while passage.drop:
                passage.drop -= 1
                next(self._inner)
            passage.before_fetch()
            batch = next(self._inner)
        except StopIteration:
            passage.at_end()
            raise
        passage.after_fetch()
        return batch
