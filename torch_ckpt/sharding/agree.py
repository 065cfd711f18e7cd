"""How ranks agree: a private group, one small collective a save, one choice a load.

Only ever called from the thread that calls the checkpointer. Knows torch.distributed. Knows
nothing of states or storage.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_ckpt.errors import DisagreementError
from torch_ckpt.manifest.attempts import FAILED
from torch_ckpt.sharding.differences import Fact, difference


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What one rank brings to a save."""

    step: int
    fingerprint: str
    attempt: str
    """Rank 0's counts."""
    run: str
    """Rank 0's counts."""
    folder: str = ""
    """The generation's name."""
    permanent: bool = False
    """Rank 0's counts."""
    busy: bool = False
    refused: bool = False
    """This rank cannot take part; it raises its own error."""
    stale: bool = False
    """This rank's state has another shape than its plan."""
    anchored: bool = False
    """Whether this rank's writer is certain to let it lose what rules name."""
    failed: Sequence[str] = ()
    """The last attempts whose saves failed on this rank."""
    facts: Callable[[], list[Fact]] = list
    """What the fingerprint is of, asked for where fingerprints differ."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all ranks know after the collective."""

    attempt: str
    busy: bool
    failed: frozenset[str]
    stale: bool = False
    """Whether any rank has to plan afresh, so that all do."""
    permanent: bool = False
    """Whether no rank may lose anything, or build on what was saved before."""
    anchored: bool = False
    """Whether those of all ranks are."""
    refusal: DisagreementError | None = None
    """Why there is nothing to save together, if so; names ranks and values."""


def _host() -> int:
    """A number that ranks on one host have in common, in whatever containers they are."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        host = os.fsencode(platform.node())
    return int(hashlib.sha256(host).hexdigest()[:15], 16)


class Transfer:
    """Messages that are on their way to and from this rank."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._works: list[Any] = []

    def send(self, data: torch.Tensor, rank: int) -> None:
        """Begin to send; the tensor must stay as it is until the end."""
        self._works.append(dist.isend(data, group=self._group, dst=rank))

    def receive(self, into: torch.Tensor, rank: int) -> None:
        """Begin to receive what that rank sends next."""
        self._works.append(dist.irecv(into, group=self._group, src=rank))

    def wait(self) -> None:
        """Return once everything has arrived."""
        for work in self._works:
            work.wait()


class Ranks:
    """This process among its peers. One that is alone needs no torch.distributed."""

    def __init__(self, distributed: bool | None, timeout_s: float) -> None:
        initialised = dist.is_available() and dist.is_initialized()
        wanted = initialised if distributed is None else distributed
        if wanted and not initialised:
            raise DisagreementError(
                "distributed=True needs torch.distributed to be initialised first"
            )
        self._timeout_s = timeout_s
        self._group: Any = None
        self.lost = False
        """Whether not all ranks came to a collective: there will be no other one."""
        self.rank, self.world_size = 0, 1
        if wanted and dist.get_world_size() > 1:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            # Private: neither NCCL jobs nor collectives of training are ever touched.
            self._group = self._private_group()

    def _private_group(self) -> Any:
        try:
            return dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise DisagreementError(
                f"rank {self.rank} cannot reach the other ranks; if torchrun has restarted them, "
                "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, which otherwise gives them "
                f"addresses of ended processes ({error})"
            ) from error

    def agree(self, mine: Proposal) -> Agreement:
        """Meet all ranks, and see whether they save the same thing.

        Raises:
            DisagreementError: one of them did not come.
        """
        if self._group is None:
            return Agreement(
                attempt=mine.attempt,
                busy=mine.busy,
                failed=frozenset(),
                stale=mine.stale,
                permanent=mine.permanent,
                anchored=mine.anchored,
            )
        words = torch.tensor(
            [
                mine.step,
                int(mine.fingerprint[:15] or "0", 16),
                int(mine.attempt, 16),
                int(mine.run[:15] or "0", 16),
                mine.busy
                | mine.refused << 1
                | mine.stale << 2
                | mine.permanent << 3
                | mine.anchored << 4,
                int(hashlib.sha256(os.fsencode(mine.folder)).hexdigest()[:15], 16),
                *(int(attempt, 16) for attempt in mine.failed),
                *[0] * (FAILED - len(mine.failed)),
            ],
            dtype=torch.int64,
        )
        table = self._all_gather(words, f"the save of step {mine.step}").tolist()
        return Agreement(
            attempt=f"{table[0][2]:08x}",
            busy=any(row[4] & 1 for row in table),
            failed=frozenset(f"{one:08x}" for row in table for one in row[6:] if one),
            stale=any(row[4] & 4 for row in table),
            permanent=bool(table[0][4] & 8),
            anchored=all(row[4] & 16 for row in table),
            refusal=self._difference(table, mine),
        )

    def _difference(self, table: list[list[int]], mine: Proposal) -> DisagreementError | None:
        refused = [rank for rank, row in enumerate(table) if row[4] & 2]
        if refused:
            if self.rank in refused:
                return None  # its own error says more
            return DisagreementError(
                f"rank {refused[0]} cannot save step {mine.step}; its own error says why"
            )
        kinds = ((0, "step"), (5, "folder"), (1, "tensors"), (3, "run"))
        for column, what in kinds:
            for rank, row in enumerate(table):
                if row[column] == table[0][column]:
                    continue
                detail = f" {table[0][0]} and {row[0]}" if column == 0 else ""
                if column == 1:
                    # All ranks come here, since they see the same table.
                    facts = self.gather(mine.facts())
                    detail = f": {difference(0, facts[0], rank, facts[rank])}"
                return DisagreementError(
                    f"ranks 0 and {rank} do not save the same {what}{detail}; nothing was saved"
                )
        return None

    def exchange(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's table of 64-bit numbers, in order of rank; only their widths must agree.

        Raises:
            DisagreementError: not all ranks came.
        """
        if self._group is None:
            return [rows]
        counts = self._all_gather(torch.tensor(rows.shape[0]), "planning").tolist()
        padded = torch.zeros((max(counts), rows.shape[1]), dtype=rows.dtype)
        padded[: len(rows)] = rows
        tables = self._all_gather(padded, "planning")
        return [table[:count] for table, count in zip(tables, counts, strict=True)]

    def any(self, mine: bool) -> bool:
        """Whether it holds on any rank.

        Raises:
            DisagreementError: not all ranks came.
        """
        if self._group is None:
            return mine
        return bool(self._all_gather(torch.tensor(int(mine)), "the load").any())

    def broadcast(self, data: bytes | None, size: int, source: int) -> memoryview:
        """The bytes of one rank, on every rank; all of them know whose they are and how many.

        Raises:
            DisagreementError: not all ranks came.
        """
        if data is None:
            passed = torch.empty(size, dtype=torch.uint8)
        else:
            passed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if self._group is not None:
            with self._together("the load"):
                dist.broadcast(passed, src=source, group=self._group)
        return passed.numpy().data

    def cores(self) -> list[int]:
        """By rank, its share of the cores of its host, at least one; all ranks call it.

        Raises:
            DisagreementError: not all ranks came.
        """
        mine = torch.tensor([[_host(), os.cpu_count() or 1]], dtype=torch.int64)
        rows = [tuple(row.flatten().tolist()) for row in self.exchange(mine)]
        beside = Counter(host for host, _ in rows)
        return [max(1, cores // beside[host]) for host, cores in rows]

    def _all_gather(self, mine: torch.Tensor, what: str) -> torch.Tensor:
        """A row for every rank."""
        everyone = torch.empty((self.world_size, *mine.shape), dtype=mine.dtype)
        with self._together(what):
            if mine.numel():
                dist.all_gather(list(everyone.unbind()), mine, group=self._group)
        return everyone

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        if self.lost:
            raise DisagreementError(
                f"rank {self.rank} came to {what}, but has lost the other ranks before; "
                "start all of them again"
            )
        try:
            yield
        except RuntimeError as error:
            self.lost = True
            # The others must not wait for this rank, whose next call would not be their next.
            dist.destroy_process_group(self._group)
            raise DisagreementError(
                f"rank {self.rank} came to {what}, but not all ranks did within "
                f"{self._timeout_s:g} s; call it on every rank, in the same order ({error})"
            ) from error

    @contextmanager
    def transfer(self) -> Iterator[Transfer]:
        """Messages between pairs of ranks, all of which have arrived at the end.

        Raises:
            DisagreementError: a rank did not take part.
        """
        transfer = Transfer(self._group)
        with self._together("the exchange of what was read"):
            yield transfer
            transfer.wait()

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Only plain data may pass, since it is pickled.

        Raises:
            DisagreementError: not all ranks came.
        """
        return self.gather(value)[0] if self._group is not None else value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in order of rank.

        Raises:
            DisagreementError: not all ranks came.
        """
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._together("a load"):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None and not self.lost and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
