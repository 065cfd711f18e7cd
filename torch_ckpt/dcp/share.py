"""One rank's share of a save: from the items of its plan to a durable shard and its part.

Knows plans, tensors and persisting. Knows nothing of other ranks or of the commit.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from torch_ckpt.dcp.orders import Order
from torch_ckpt.dcp.values import Values, resolve_object
from torch_ckpt.errors import CkptError, UnsupportedState
from torch_ckpt.manifest.blocks import PAGE_BYTES, Piece, place
from torch_ckpt.manifest.schema import Part
from torch_ckpt.staging.objects import Json
from torch_ckpt.staging.regions import check_supported, dtype_name
from torch_ckpt.staging.snapshot import copy_exactly
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.leftovers import withdraw
from torch_ckpt.writer.shard import part_of, write_shard

_THREADS = 4


class Share:
    """What one rank writes in one save.

    Raises:
        UnsupportedState: something in it cannot be saved; the message names it.
    """

    def __init__(
        self, plan: SavePlan, planner: SavePlanner, order: Order, reserved: Iterable[str]
    ) -> None:
        self.order = order
        self._planner = planner
        self._values = Values(reserved)
        self.documents: dict[str, Json] = {}
        """By key, the values of this share that are not tensors."""
        self._items: dict[tuple[str, tuple[int, ...]], WriteItem] = {}
        pieces = []
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                key = item.index.fqn
                self.documents[key] = self._values.document(key, resolve_object(planner, item))
            elif (piece := _piece(item)) is not None:
                self._items[piece.name, piece.offsets] = item
                pieces.append(piece)
        for name, tensor in self._values.tensors.items():
            whole = tuple(tensor.shape)
            pieces.append(Piece(name, dtype_name(tensor.dtype), whole, (0,) * len(whole), whole))
        self.placed = place(pieces)
        self.raw_bytes = sum(piece.bytes for piece in pieces)

    @property
    def inner(self) -> tuple[str, ...]:
        """The names of tensors and arrays inside values."""
        return tuple(self._values.tensors)

    def job(self, store: Store, *, keep: Json, framework: dict[str, str]) -> Job:
        """The same share in the words of the writer."""
        order = self.order
        return Job(
            root=store.url,
            folder=order.folder,
            step=order.step,
            attempt=order.attempt,
            run=order.run,
            rank=order.rank,
            world_size=order.world_size,
            created=order.created,
            pieces=[],  # for a process that has not laid them out itself
            raw_bytes=self.raw_bytes,
            parent=order.parent,
            framework=framework,
            keep=keep,
        )

    def write(self, job: Job, store: Store) -> Part:
        """Copy, hash and make durable; return the part, which is not published yet.

        Raises:
            StorageError: storage refused; what was written is removed as far as possible.
        """
        memory = mmap.mmap(-1, -(-self.raw_bytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES)
        self._copy(torch.frombuffer(memory, dtype=torch.uint8))
        try:
            store.make_folder(job.folder)
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-dcp") as pool:
                written = write_shard(job, self.placed, memoryview(memory), store, pool)
            return part_of(job, self.placed, written)
        except (CkptError, OSError):
            withdraw(store, job.folder, job.rank, job.attempt)
            raise

    def _copy(self, region: torch.Tensor) -> None:
        for item in self.placed:
            piece = item.piece
            if piece.bytes == 0:
                continue
            copy = region[item.start : item.start + piece.bytes].view(getattr(torch, piece.dtype))
            copy_exactly(copy.view(piece.shape), self._live(piece))

    def _live(self, piece: Piece) -> torch.Tensor:
        item = self._items.get((piece.name, piece.offsets))
        if item is None:
            return self._values.tensors[piece.name]
        tensor = self._planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedState(
                key=piece.name, what="no tensor, but was planned as one", remedy="fix the planner"
            )
        tensor = tensor.detach()
        check_supported(piece.name, tensor)
        if (dtype_name(tensor.dtype), tuple(tensor.shape)) != (piece.dtype, piece.shape):
            raise UnsupportedState(
                key=piece.name,
                what=f"{dtype_name(tensor.dtype)}{list(tensor.shape)}, but was planned as "
                f"{piece.dtype}{list(piece.shape)}",
                remedy="fix the planner, or do not change the state during a save",
            )
        return tensor


def _piece(item: WriteItem) -> Piece | None:
    """The piece of an item; None for an empty part of a tensor that is not empty."""
    data = item.tensor_data
    name = item.index.fqn
    if data is None or data.chunk is None:
        raise UnsupportedState(
            key=name, what="planned without its size", remedy="use DefaultSavePlanner"
        )
    shape, whole = tuple(data.chunk.sizes), tuple(data.size)
    if 0 in shape and math.prod(whole):
        return None
    return Piece(name, dtype_name(data.properties.dtype), shape, tuple(data.chunk.offsets), whole)
