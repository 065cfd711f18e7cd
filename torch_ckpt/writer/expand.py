"""Codes that a trainer's device made of moments, turned in place into the values a reader gets.

In the room of a piece its codes come first, the scales right behind. From the back to the front,
words take the place of codes that have been read. Knows codecs and a slab. Knows nothing of blocks
or of what may be lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait

from torch_ckpt.errors import SaveFailed
from torch_ckpt.manifest.blocks import Placed
from torch_ckpt.writer.job import Job

_CHUNK = 1 << 18
"""Elements decoded at once."""


def expand(job: Job, placed: list[Placed], slab: memoryview, pool: Executor) -> None:
    """Give every piece that the job names as quantised its values; once for each snapshot.

    Raises:
        SaveFailed: a piece is not there, or is no codes.
    """
    items = {item.start: item for item in placed if item.piece.bytes}
    for start, codec in job.quantised:
        item = items.get(start)
        if item is None:
            raise SaveFailed(step=job.step, reason=f"no tensor begins at its coded byte {start}")
        room = slab[start : start + item.piece.bytes]
        try:
            _expand(room, codec, item.piece.dtype, pool)
        except ValueError as error:
            reason = f"the codes of {item.piece.name} cannot be read: {error}"
            raise SaveFailed(step=job.step, reason=reason) from error


def _expand(room: memoryview, codec: str, dtype: str, pool: Executor) -> None:
    import numpy as np  # a writer of raw shards starts without it

    from torch_ckpt.codecs import fp8
    from torch_ckpt.codecs.floats import GROUP, ITEMSIZE, KINDS, groups_of

    made = {one.name: one for one in (fp8.Fp8(), fp8.Fp8Sqrt())}.get(codec)
    if made is None or dtype not in KINDS:
        raise ValueError(f"{dtype} as {codec}")
    kind = KINDS[dtype]
    values = np.frombuffer(room, f"<u{ITEMSIZE[kind]}")
    count, everything = len(values), np.frombuffer(room, np.uint8)
    scales = everything[count : count + groups_of(count)].copy()
    if not ((scales >= fp8.LEAST) & (scales <= fp8.MOST)).all():
        raise ValueError("a scale is out of range")

    def decode(start: int, stop: int) -> None:
        codes = everything[start:stop].copy()  # near the front, words lie over their own codes
        made.values_into(values[start:stop], codes, scales[start // GROUP :], kind)

    for wave in _waves(count, ITEMSIZE[kind], GROUP, decode):
        done = [pool.submit(one) for one in wave]
        wait(done)  # all of them, also if one fails: the slab may be given back then
        for one in done:
            one.result()


def _waves(
    count: int, itemsize: int, group: int, decode: Callable[[int, int], None]
) -> Iterator[list[Callable[[], None]]]:
    """Work that may be done side by side, wave by wave: no word lies over a code still to be read.

    Words from `first` on lie behind all codes before `end`.
    """
    end = count
    while end:
        first = -(-end // itemsize // group) * group if end > _CHUNK else 0
        yield [
            functools.partial(decode, start, min(start + _CHUNK, end))
            for start in range(first, end, _CHUNK)
        ]
        end = first
