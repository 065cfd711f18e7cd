"""Values of ranks that were saved by another number of ranks: what each rank gets of them.

An object that knows what to do defines `reshard_state_dict`; anything else has to stay as it is,
since no one else can say which rank's value it should get. Knows structures and documents. Knows
nothing of storage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch_ckpt.errors import StateMismatch
from torch_ckpt.staging.objects import Decoder, Json, child, decode
from torch_ckpt.staging.tree import PerRank

logger = logging.getLogger(__name__)


@runtime_checkable
class Reshardable(Protocol):
    """An object in a `PerRank` that can continue from the states of another number of ranks."""

    def reshard_state_dict(self, states: Sequence[Any], rank: int, world_size: int) -> Any:
        """What `load_state_dict` gets on one of `world_size` ranks.

        `states` holds what every saved rank's `state_dict` was, in their order. It is called on
        every rank and must give the same for the same arguments.
        """
        ...

    def load_state_dict(self, state: Any) -> object:
        """Take the state of this rank."""
        ...


class Resize:
    """What the ranks of a generation had saved, bound on one of another number of ranks."""

    def __init__(
        self, per_rank: Sequence[Mapping[str, Json]], *, rank: int, world_size: int
    ) -> None:
        """Args:
        per_rank: the values of every saved rank, by key path.
        """
        self._per_rank, self._rank, self._world_size = per_rank, rank, world_size
        self._derived: list[str] = []
        self._kept: list[str] = []

    def documents(self) -> list[Json]:
        """The documents of all saved ranks."""
        return [document for own in self._per_rank for document in own.values()]

    def bind(self, name: str, target: Any, path: str, source: Source) -> Resized:
        """What is to happen to the live value at `path`, which ranks saved under `name`."""
        documents = [own.get(name) for own in self._per_rank]
        inner = target.value if isinstance(target, PerRank) else target
        return Resized(target, self._bind(documents, inner, path, source))

    def _bind(
        self, documents: Sequence[Json | None], target: Any, path: str, source: Source
    ) -> list[_Resharded]:
        everywhere = [document for document in documents if document is not None]
        complete = len(everywhere) == len(documents)
        if complete and isinstance(target, Reshardable):
            for document in everywhere:
                source.want(document)
            self._derived.append(path)
            ranks = (self._rank, self._world_size)
            return [_Resharded(target, everywhere, source.decoder, ranks, path)]
        if type(target) is dict and any(isinstance(item, Reshardable) for item in target.values()):
            columns = [dict(source.items(document) or ()) for document in everywhere]
            return [
                one
                for key, item in target.items()
                for one in self._bind(
                    [own.get(key) for own in columns] if complete else [None],
                    item,
                    child(path, key),
                    source,
                )
            ]
        self._kept.append(path)
        return []

    def tell(self, where: str) -> None:
        """Say, in one line of rank 0, what becomes of the values of ranks."""
        if self._rank != 0 or not (self._derived or self._kept):
            return
        done = []
        if self._derived:
            done.append(f"derived anew from what all ranks had: {', '.join(self._derived)}")
        if self._kept:
            done.append(
                f"left as in a fresh run, for want of a reshard_state_dict: {', '.join(self._kept)}"
            )
        logger.warning(
            "%s was saved by %d rank(s) and is loaded by %d. Values of ranks are %s",
            where,
            len(self._per_rank),
            self._world_size,
            "; ".join(done),
        )


@dataclass(frozen=True)
class Source:
    """What documents are read with."""

    decoder: Decoder
    want: Callable[[Json], None]
    """Has every tensor of a document read."""
    items: Callable[[Json], list[tuple[Any, Json]] | None]
    """Keys and value documents of a dict's document."""


@dataclass(frozen=True)
class Resized:
    """A live value in which some objects take a new state."""

    kept: Any
    objects: Sequence[_Resharded]

    def value(self) -> Any:
        """The value, once they have taken it."""
        for one in self.objects:
            one.apply()
        return self.kept


@dataclass(frozen=True)
class _Resharded:
    """An object and the documents of all ranks that it is to continue from."""

    target: Reshardable
    documents: Sequence[Json]
    decoder: Decoder
    ranks: tuple[int, int]
    path: str

    def apply(self) -> None:
        states = [decode(document, self.decoder, self.path) for document in self.documents]
        try:
            self.target.load_state_dict(self.target.reshard_state_dict(states, *self.ranks))
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            name = type(self.target).__name__
            raise StateMismatch(
                where=self.path, misshaped=[f"{name}, for another number of ranks: {error}"]
            ) from error
