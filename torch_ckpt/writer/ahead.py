"""Work that is done side by side and used in order, a few pieces ahead. Knows threads alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

_Result = TypeVar("_Result")


def in_order(
    pool: Executor, work: Iterable[Callable[[], _Result]], ahead: int
) -> Iterator[_Result]:
    """The results of `work` in order, of which up to `ahead` are made before they are asked for.

    When the caller stops early, what has begun is waited for: its memory may be given back then.
    """
    pending: deque[Future[_Result]] = deque()
    upcoming = iter(work)
    try:
        while True:
            while len(pending) < ahead and (one := next(upcoming, None)) is not None:
                pending.append(pool.submit(one))
            if not pending:
                return
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        for future in pending:
            if not future.cancelled():
                future.exception()
