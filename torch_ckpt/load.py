"""The load, top to bottom: open a generation, fit it to a structure, read, verify, fill.

Every block's SHA-256 is compared before one of its bytes reaches a tensor. Knows parts and
tensors. Knows nothing of which generation to choose.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from torch_ckpt.errors import FormatError, PickleRefused
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.header import check_header, is_raw
from torch_ckpt.generations.read import BlockReader
from torch_ckpt.generations.shards import Shards
from torch_ckpt.manifest.commit import read_whole
from torch_ckpt.manifest.schema import Part
from torch_ckpt.manifest.tables import BlockTable
from torch_ckpt.sharding.agree import Ranks
from torch_ckpt.sharding.broadcast import AT_ONCE, PeerFailed, pass_on, split
from torch_ckpt.sharding.documents import parts_together
from torch_ckpt.sharding.needs import Needs, everyone_needs
from torch_ckpt.sharding.reshard import Delivery, deliver, deliveries, overlapping
from torch_ckpt.sharding.window import Forget
from torch_ckpt.staging.bind import Binding
from torch_ckpt.staging.documents import Stored
from torch_ckpt.staging.objects import pickled
from torch_ckpt.staging.resharded import Resize
from torch_ckpt.staging.sharded import Box, boxes, is_sharded, local_of
from torch_ckpt.storage.store import Store

_THREADS_OF_FILES = min(8, os.cpu_count() or 1)
"""Hashing keeps the cores busy while the host reads ahead; more threads only cost memory."""

_THREADS_ELSEWHERE = 8
"""Each waits for its answer most of the time."""

_PASSED_OF_FILES = 4
"""The most blocks of several ranks that one has in its hands where reading takes no time."""


Keep = Callable[[Part, int, memoryview], None]
"""Takes the stored bytes of a verified block, from any thread."""


class Opened:
    """A generation whose documents have been read and checked."""

    def __init__(
        self,
        store: Store,
        generation: Generation,
        *,
        partial: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """With `partial`, shards may be missing here that another rank has.

        With `ranks`, all of them open the same manifest at once, and each reads a share of its
        documents and headers.
        """
        self.generation = generation
        self.files = store.capabilities.files
        """Whether it lies in files of this host, which are read without waiting."""
        folder, manifest = generation.folder, generation.manifest
        if ranks is None:
            whole = read_whole(store, folder, manifest)
        else:
            whole = parts_together(store, folder, manifest, ranks)
        self.parts: list[Part] = whole.parts
        self.tensors = whole.tensors
        self.readers = [BlockReader(store, folder, part) for part in self.parts]
        self.here: frozenset[int] | None = None
        """The parts whose shards are here; None where all of them have to be."""
        if partial:
            shards = Shards(store)
            self.here = frozenset(
                number
                for number, part in enumerate(self.parts)
                if shards.lacking(folder, part) is None
            )
            self._check_heads(store, sorted(self.here))
        else:
            first, step = (ranks.rank, ranks.world_size) if ranks else (0, 1)
            self._check_heads(store, range(first, len(self.parts), step))
        self.tree = self.parts[0].tree
        self._aliases = {k: v for part in self.parts for k, v in part.aliases.items()}

    def _check_heads(self, store: Store, parts: Sequence[int]) -> None:
        """Compare the headers of plain shards with what the parts say of them."""
        heads = [
            (self.readers[part], number)
            for part in parts
            for number in range(len(self.parts[part].files))
            if is_raw(self.readers[part], number)
        ]
        threads = 1 if self.files else _THREADS_ELSEWHERE
        with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-heads") as pool:
            checked = [
                pool.submit(check_header, store, self.generation.folder, *head) for head in heads
            ]
            try:
                for one in checked:
                    one.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def stored(self, name: str) -> Stored:
        """What is stored under a name or an alias of it.

        Raises:
            FormatError: the tree names a tensor that no part holds.
        """
        primary = self._aliases.get(name, name)
        found = self.tensors.get(primary)
        if found is None:
            raise FormatError(
                file=self.generation.url, reason=f"its tree names {name!r}, which no part holds"
            )
        return Stored(primary, found.dtype, found.shape)


def fit(
    opened: Opened, into: Any, *, rank: int, world_size: int, strict: bool, allow_pickle: bool
) -> Binding:
    """Fit an opened generation to a structure, of which nothing is touched.

    Raises:
        StateMismatch: keys or shapes do not fit.
        PickleRefused: it holds pickled values and they were not allowed.
    """
    resize = None
    if world_size != len(opened.parts):
        every_rank = [part.per_rank for part in opened.parts]
        resize = Resize(every_rank, rank=rank, world_size=world_size)
    tree = opened.tree
    binding = _bind(opened, tree, into, rank, resize, strict=strict, allow_pickle=allow_pickle)
    if resize is not None:
        resize.tell(opened.generation.url)
    return binding


def load_fresh(opened: Opened, *, rank: int, allow_pickle: bool) -> Any:
    """The state of an opened generation in memory of its own, on the CPU.

    Raises:
        IntegrityError: stored bytes are not the ones that were written.
        FormatError: a file of it is missing.
        PickleRefused: it holds pickled values and they were not allowed.
    """
    holder: dict[str, Any] = {"state": None}
    tree = {"state": opened.tree}
    binding = _bind(opened, tree, holder, rank, strict=True, allow_pickle=allow_pickle)
    with missing_is_damage(opened.generation.folder):
        read_tensors(opened, binding.targets)
    return binding.apply()["state"]


@contextmanager
def missing_is_damage(folder: str) -> Iterator[None]:
    """Say of a file that is missing in a generation that this is damage.

    Not as itself: scripts take it for a first run, where nothing has been saved yet.

    Raises:
        FormatError: a file was missing.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FormatError(
            file=str(error.filename or folder),
            reason="is missing, so this generation is damaged; load an earlier one",
        ) from error


def _bind(
    opened: Opened,
    tree: Any,
    into: Any,
    rank: int,
    resize: Resize | None = None,
    *,
    strict: bool,
    allow_pickle: bool,
) -> Binding:
    """Check permission for all that was pickled, then fit the document to the structure."""
    url = opened.generation.url
    own = opened.parts[rank].per_rank if rank < len(opened.parts) else {}
    values = own.values() if resize is None else resize.documents()
    flagged = [line for document in (tree, *values) for line in pickled(document)]
    if flagged and not allow_pickle:
        raise PickleRefused(where=url, values=flagged)
    try:
        return Binding(
            where=url,
            tree=tree,
            per_rank=own,
            stored=opened.stored,
            into=into,
            strict=strict,
            allow_pickle=allow_pickle,
            resize=resize,
        )
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError(file=url, reason=f"its tree is malformed ({error!r})") from error


def read_tensors(opened: Opened, targets: dict[str, list[torch.Tensor]]) -> None:
    """Read and verify every block that the targets need, once, straight into them."""
    Reads(opened, targets).run()


def _whole(tensor: torch.Tensor) -> Box:
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


class Reads:
    """The blocks of all parts, numbered through, and which of them fill the targets of this rank.

    Making it touches nothing and asks nobody, so that what does not fit on one rank is known
    before all of them begin to read.
    """

    def __init__(self, opened: Opened, targets: dict[str, list[torch.Tensor]]) -> None:
        self._opened, self._targets = opened, targets
        counts = [len(part.blocks) for part in opened.parts]
        self._first = [0, *accumulate(counts)]
        self.wanted: dict[int, list[Delivery]] = {}
        self._scratch = threading.local()
        self._keep: Keep | None = None
        held = boxes({n: t for n, tensors in targets.items() if is_sharded(t := tensors[0])})
        for name, tensors in targets.items():
            for tensor in tensors:
                box = held.get(name) if is_sharded(tensor) else _whole(tensor)
                if is_sharded(tensor) and tensor is not tensors[0]:
                    box = boxes({name: tensor}).get(name)
                if box is not None:
                    self._want(name, local_of(tensor).detach(), box)

    def run(self, ranks: Ranks | None = None, keep: Keep | None = None) -> None:
        """Read, verify and fill; with `ranks` all of them do, and what several need is read once.

        `keep` gets every block that comes by as it is stored: its part, its number in that, its
        stored bytes. Of what another rank has read that is so only where these are the raw ones.

        Where storage turns out to be damaged, tensors may be partly filled.

        Raises:
            IntegrityError: stored bytes are not the ones that were written.
            PeerFailed: so it was on another rank.
        """
        self._keep = keep
        # First, and even if reading fails: bytes that are moved into a tensor leave no other trace,
        # and autograd as well as a snapshot under way must learn of them.
        for tensors in self._targets.values():
            for tensor in tensors:
                if not tensor.is_inference():
                    increment_version(local_of(tensor).detach())
        if ranks is None or ranks.world_size == 1:
            with self._reading(_THREADS_OF_FILES) as pool:
                self._alone(pool, sorted(self.wanted))
        else:
            self._together(ranks)

    @contextmanager
    def _reading(self, of_files: int) -> Iterator[Executor]:
        threads = of_files if self._opened.files else _THREADS_ELSEWHERE
        with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-read") as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _want(self, name: str, tensor: torch.Tensor, box: Box) -> None:
        """Register what a live tensor, a box of the whole one, needs."""
        for number, chunk in overlapping(self._opened.tensors[name], box):
            delivery = deliveries(chunk, tensor, box)
            if delivery is not None:
                blocks = self._opened.readers[number].blocks_for(
                    delivery.start, delivery.end - delivery.start
                )
                for block in blocks:
                    self.wanted.setdefault(self._first[number] + block, []).append(delivery)

    def _alone(self, pool: Executor, blocks: Iterable[int]) -> None:
        """Read blocks for this rank only."""
        for future in [pool.submit(self._read_and_take, block) for block in blocks]:
            future.result()

    def _together(self, ranks: Ranks) -> None:
        """Read with all ranks, each block once; all of them call it."""
        mine = np.zeros(self._first[-1], dtype=bool)
        mine[list(self.wanted)] = True
        tables = [BlockTable.of(part.blocks) for part in self._opened.parts]
        sizes = np.concatenate([np.asarray(table.raw_bytes) for table in tables])
        needs = everyone_needs(mine, ranks)
        # Ranks on one host share its cores.
        of_files = [min(_THREADS_OF_FILES, cores) for cores in ranks.cores()]
        at_once = AT_ONCE
        if self._opened.files:  # a block for each thread of each rank, if they all need the same
            at_once = min(_PASSED_OF_FILES, min(of_files) * max(1, needs.most()))
        plan = split(needs, sizes, ranks.rank, at_once, self._holders(ranks))
        failure: BaseException | None = None
        with self._reading(of_files[ranks.rank]) as pool:
            try:
                self._alone(pool, plan.alone)
            except Exception as error:  # the others must hear of it, whatever it is
                failure = error
            if ranks.any(failure is not None):
                raise failure or PeerFailed("another rank could not read its own share")
            self._scratch = threading.local()  # what comes now has memory of its own
            pass_on(plan, sizes, ranks, pool, self, slow=not self._opened.files)

    def _holders(self, ranks: Ranks) -> Needs | None:
        """Which rank can read which block; None if every rank can read all of them."""
        here = self._opened.here
        if here is None:
            return None
        mine = np.zeros(self._first[-1], dtype=bool)
        for number in here:
            mine[self._first[number] : self._first[number + 1]] = True
        return everyone_needs(mine, ranks)

    def _place(self, block: int) -> tuple[BlockReader, int]:
        part = bisect_right(self._first, block) - 1
        return self._opened.readers[part], block - self._first[part]

    def read(self, block: int, into: memoryview | None) -> torch.Tensor:
        reader, index = self._place(block)
        stored = reader.part.blocks[index]
        if into is None or len(into) < stored.bytes:
            memory = _memory(stored.bytes)
        else:
            memory = into
        raw = reader.read(index, memory)
        self._offer(reader, index, memory)
        if into is not None and raw.obj is not into.obj:  # decoded elsewhere
            into[: len(raw)] = raw
            raw = into[: len(raw)]
        return torch.frombuffer(raw, dtype=torch.uint8)

    def _read_and_take(self, block: int) -> None:
        reader, index = self._place(block)
        size = reader.part.blocks[index].bytes
        if len(getattr(self._scratch, "buffer", b"")) < size:
            self._scratch.buffer = None  # first, so that there are never two
            self._scratch.buffer = _memory(size)
        raw = reader.read(index, self._scratch.buffer)
        self._offer(reader, index, self._scratch.buffer)
        self.take(block, torch.frombuffer(raw, dtype=torch.uint8))

    def take_received(self, block: int, raw: torch.Tensor) -> None:
        reader, index = self._place(block)
        received = raw.numpy().data
        reader.check_raw(index, received)
        if reader.part.blocks[index].codec == "raw":
            self._offer(reader, index, received)
        self.take(block, raw)

    def _offer(self, reader: BlockReader, index: int, stored: memoryview) -> None:
        if self._keep is not None:
            self._keep(reader.part, index, stored[: reader.part.blocks[index].bytes])

    def take(self, block: int, raw: torch.Tensor, forget: Forget | None = None) -> None:
        reader, index = self._place(block)
        deliver(self.wanted.get(block, ()), raw, reader.starts[index], forget)


def _memory(size: int) -> memoryview:
    """Room for bytes; unlike a bytearray it is not filled with zeros first."""
    return np.empty(size, dtype=np.uint8).data
