"""What a rank does in the planning benchmark: plan one state by either side, and nothing else.

Knows both sides' planning. Knows nothing of rows, judgement or how numbers are shown.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future
from watch import Watch

from torch_ckpt.sharding.agree import Proposal, Ranks
from torch_ckpt.sharding.plan import Planner
from torch_ckpt.staging.tree import flatten

ROWS, COLUMNS = 2, 8
"""Of a rank's part of every tensor: small, since planning costs by the tensor."""

GLOBAL_PLAN_LIMIT_S = 15.0
"""Twice as many ranks take DCP at least twice as long; after this it is not asked for more."""


def state(tensors: int) -> dict[str, dict[str, torch.Tensor]]:
    """Small tensors, each shared out over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model": {
            f"layers.{number}.weight": DTensor.from_local(
                torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)], run_check=False
            )
            for number in range(tensors)
        }
    }


class PlansOnly(dcp.StorageWriter):
    """Stores nothing, and notes when DCP is done planning and would begin to write."""

    def __init__(self) -> None:
        self.planned = 0.0

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        return plans

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[Any]]:
        self.planned = time.perf_counter()
        future: Future[list[Any]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Any, results: Any) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def storage_meta(self) -> None:
        return None


def plan_for_real(rank: int, tensors: int, repeats: int) -> dict[str, list[float]]:
    """Seconds on this rank from the state to its plan: both sides, by turns."""
    live = state(tensors)
    ranks = Ranks(None, timeout_s=120)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[[], float]) -> None:
        dist.barrier()
        seconds.setdefault(name, []).append(act())

    for repeat in range(repeats + 1):
        planner = Planner(ranks.rank, ranks.world_size)
        ours = [(f"ours {when}", lambda p=planner: _ours(p, ranks, live)) for when in _WHENS]
        plain = [(f"dcp {when}", lambda: _dcp(live, caching=False)) for when in _WHENS]
        for name, act in [*ours, *plain] if repeat % 2 else [*plain, *ours]:
            timed(name, act)
    # DCP keeps cached plans for the whole process, so there is one first save with them.
    for number in range(repeats + 2):
        timed(f"dcp cached {_WHENS[number > 0]}", lambda: _dcp(live, caching=True))
    ranks.close()
    # The first of everything is not counted: imports and connections.
    return {n: s if n == "dcp cached first" else s[1:] for n, s in seconds.items()}


_WHENS = ("first", "later")


def _ours(planner: Planner, ranks: Ranks, live: Any) -> float:
    began = time.perf_counter()
    flat = flatten(live, rank=ranks.rank)
    survey = planner.survey(flat)
    agreement = ranks.agree(
        Proposal(step=1, fingerprint=survey.fingerprint, attempt="1", run="1", stale=planner.stale)
    )
    planner.plan(flat, ranks.exchange, afresh=agreement.stale)
    return time.perf_counter() - began


def _dcp(live: Any, *, caching: bool) -> float:
    writer = PlansOnly()
    planner = dcp.DefaultSavePlanner(enable_plan_caching=caching)
    began = time.perf_counter()
    dcp.save(live, storage_writer=writer, planner=planner)
    return writer.planned - began


class _Simulated(Ranks):
    """One of many ranks whose peers all say the same."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size
        self._group, self._timeout_s = object(), 0.0
        self.sent_bytes = 0

    def _all_gather(self, mine: torch.Tensor, what: str) -> torch.Tensor:
        self.sent_bytes += mine.nbytes
        return mine.expand(self.world_size, *mine.shape)

    def close(self) -> None: ...


def _pretend(world_size: int) -> None:
    """Be rank 0 of many, of which no other one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def simulate_ours(rank: int, world_size: int, tensors: int, repeats: int) -> dict[str, Any]:
    """What planning costs one of many ranks, with what its peers send made up beforehand."""
    _pretend(world_size)
    live = state(tensors)
    result: dict[str, Any] = {"first": [], "later": []}
    mine = torch.tensor(
        [[number, 0, 0, ROWS, COLUMNS] for number in _in_order(live)], dtype=torch.int64
    )
    tables = [mine + torch.tensor([0, ROWS * peer, 0, 0, 0]) for peer in range(world_size)]
    watch = Watch()
    for _ in range(repeats):
        ranks, planner = _Simulated(world_size), Planner(0, world_size)

        def exchange(rows: torch.Tensor) -> list[torch.Tensor]:
            if not torch.equal(rows, mine):
                raise RuntimeError("the rows of peers were made up after another pattern")
            return tables

        ranks.exchange = exchange
        for when in _WHENS:
            ranks.sent_bytes = 0
            result[when].append(_ours(planner, ranks, live))
        result["later_sent_bytes"] = ranks.sent_bytes
    result["first_sent_bytes"] = mine.nbytes
    result["memory_bytes"] = watch.stop()[1]
    return result


def _in_order(live: dict[str, dict[str, torch.Tensor]]) -> range:
    return range(len(live["model"]))


def simulate_dcp(rank: int, most_ranks: int, tensors: int) -> dict[str, Any]:
    """DCP's coordinator with the plans of ever more ranks, until it takes too long."""
    _pretend(most_ranks)
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state(tensors), None, True)
    mine = planner.create_local_plan()
    ranks, result = min(32, most_ranks), {}
    while True:
        plans = [_plan_of(peer, ranks, mine) for peer in range(ranks)]
        gathered = sum(len(pickle.dumps(plan)) for plan in plans[:4]) * ranks // min(4, ranks)
        watch, began = Watch(), time.perf_counter()
        planner.create_global_plan(plans)
        result = {
            "ranks": ranks,
            "seconds": time.perf_counter() - began,
            "memory_bytes": watch.stop()[1],
            "gathered_bytes": gathered,
        }
        if result["seconds"] > GLOBAL_PLAN_LIMIT_S or ranks * 2 > most_ranks:
            return result
        ranks *= 2


def _plan_of(peer: int, ranks: int, mine: dcp.SavePlan) -> dcp.SavePlan:
    """What a peer would plan: the same tensors, its own rows of them."""
    items, offsets = [], torch.Size([ROWS * peer, 0])
    whole = torch.Size([ROWS * ranks, COLUMNS])
    for item in mine.items:
        if item.tensor_data is None:
            raise RuntimeError("only tensors are planned here")
        chunk = ChunkStorageMetadata(offsets, torch.Size([ROWS, COLUMNS]))
        data = replace(item.tensor_data, chunk=chunk, size=whole)
        items.append(replace(item, index=MetadataIndex(item.index.fqn, offsets), tensor_data=data))
    return replace(mine, items=items)
