"""Batch samplers put around others, so that batches which are passed over count for nobody.

Knows iteration and lengths. Knows nothing of Accelerate or of what a batch holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Passing:
    """A batch sampler with another way of going through it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


class Signalling(Passing):
    """Says when it has drawn the batches that are passed over, and the one after them."""

    def __init__(self, inner: Any, at: int, signal: Callable[[], None]) -> None:
        super().__init__(inner)
        self._at, self._signal = at, signal

    def __iter__(self) -> Iterator[Any]:
        for index, indices in enumerate(self._inner):
            if index == self._at:
                self._signal()
            yield indices


class Shorter(Passing):
    """Counts without the batches that are read again and dropped."""

    def __init__(self, inner: Any, dropped: int) -> None:
        super().__init__(inner)
        self._dropped = dropped

    def __len__(self) -> int:
        return max(0, len(self._inner) - self._dropped)
