"""An epoch's samples as one order that all ranks share, and the rest of it dealt out anew.

Of an order of sample numbers each of n ranks takes every n-th. The order itself does not depend on
n, so a place in it is a count of samples, and what follows can be dealt among any number of ranks:
no sample is lost, and none is seen twice but for the few that make the last shares equal.
Knows torch's loaders and samplers. Knows nothing of Lightning's loops, or of storage.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_ckpt.moment import Moment

Order = dict[str, Any]
"""How an order comes about: by a seed, by a generator's state, or, if empty, as the data lies."""


@dataclass(frozen=True)
class Share:
    """What one rank takes of an order."""

    rank: int
    ranks: int
    drop_last: bool
    """Whether shares are made equal by leaving samples out, not by repeating some."""


@dataclass(frozen=True)
class Dealt:
    """An epoch whose beginning was seen before it was dealt out."""

    order: Order
    seen: int
    """Samples of all ranks before that."""
    batches: int
    """What the loops count as this rank's batches before that."""


def place(
    loaders: list[Any],
    world_size: int,
    *,
    batches: int,
    under: tuple[Moment | None, Moment | None],
    dealt: Dealt | None,
) -> dict[str, Any] | None:
    """How far all ranks together are after `batches` of this rank; None if that cannot be said.

    `under` are the moments before the epoch's iterator was made, and before its first batch.
    """
    share = share_of(loaders, world_size)
    if share is None:
        return None
    order = dealt.order if dealt is not None else _order_of(loaders[0], under)
    if order is None:
        return None
    before = (dealt.seen, dealt.batches) if dealt is not None else (0, 0)
    a_batch = loaders[0].batch_sampler.batch_size * share.ranks
    return {
        "order": order,
        "size": len(loaders[0].dataset),
        "batch": a_batch,
        "seen": before[0] + (batches - before[1]) * a_batch,
        "dealt": dealt is not None,
    }


def share_of(loaders: list[Any], world_size: int) -> Share | None:
    """What this rank takes of each epoch; None where no one order is shared by all ranks."""
    if len(loaders) != 1 or not _is_plain(loaders[0]):
        return None
    sampler = loaders[0].batch_sampler.sampler
    if type(sampler) is DistributedSampler:
        return Share(sampler.rank, sampler.num_replicas, sampler.drop_last)
    if type(sampler) is RandomSampler and (
        sampler.replacement or sampler.num_samples != len(loaders[0].dataset)
    ):
        return None
    alone = world_size == 1 and type(sampler) in (RandomSampler, SequentialSampler)
    return Share(0, 1, drop_last=False) if alone else None


def _is_plain(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "load_state_dict")  # it would go to a place of its own
        and type(loader.batch_sampler) is BatchSampler
    )


def _order_of(loader: Any, moments: tuple[Moment | None, Moment | None]) -> Order | None:
    sampler = loader.batch_sampler.sampler
    if type(sampler) is DistributedSampler:
        return {"seed": sampler.seed + sampler.epoch} if sampler.shuffle else {}
    if type(sampler) is SequentialSampler:
        return {}
    # Workers are sent samples when the iterator is made, before the first batch is asked for.
    under = moments[0] if loader.num_workers else moments[1]
    if under is None or sampler.generator is not loader.generator:
        return None
    # What the loader's iterator and RandomSampler do when the first sample number is drawn.
    own = under["generators"][0]
    generator = torch.Generator()
    generator.set_state(torch.as_tensor(own[0] if own else under["process"]["torch"]))
    if loader.num_workers and not any(under.get("running", [])[:1]):
        # The seed of the workers comes first, unless they run already.
        torch.empty((), dtype=torch.int64).random_(generator=generator)
    if own:
        return {"generator": generator.get_state()}
    return {"seed": int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())}


def rest_of(found: dict[str, Any], share: Share) -> list[int]:
    """The sample numbers of this rank in what is left of an epoch.

    Shares are equal: samples from the beginning of the order are repeated, or some at its end are
    left out, as `DistributedSampler` does.
    """
    size, order = found["size"], found["order"]
    generator = torch.Generator()
    if "seed" in order:
        generator.manual_seed(order["seed"])
    elif "generator" in order:
        generator.set_state(torch.as_tensor(order["generator"]))
    whole = torch.randperm(size, generator=generator).tolist() if order else list(range(size))
    rest = whole[found["seen"] :]
    if share.drop_last:
        rest = rest[: len(rest) - len(rest) % share.ranks]
    elif rest:
        short = -len(rest) % share.ranks
        rest += (whole * math.ceil(short / size))[:short]
    return rest[share.rank :: share.ranks]


def batches_of(samples: list[int], loader: Any) -> list[list[int]]:
    """Samples in batches as the loader's own batch sampler would make them."""
    return list(
        BatchSampler(samples, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last)
    )


class Rest:
    """Stands in for a loader's batch sampler while its iterator is made, and gives what is left.

    Once: an iterator that lives on, as that of persistent workers does, then gets whole epochs.
    """

    def __init__(self, loader: Any, batches: list[list[int]]) -> None:
        self._loader, self._inner = loader, loader.batch_sampler
        self._batches: list[list[int]] | None = batches
        vars(loader)["batch_sampler"] = self  # DataLoader refuses the plain assignment

    def remove(self) -> None:
        """Give the loader its own batch sampler back; iterators made meanwhile keep this one."""
        vars(self._loader)["batch_sampler"] = self._inner

    def advance(self) -> None:
        """Nothing: what was seen is not in it."""

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[list[int]]:
        # Taken at the first batch: an iterator with workers asks twice and uses the second.
        batches, self._batches = self._batches, None
        yield from self._inner if batches is None else batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


# ── the seed that all epochs share ────────────────────────────────────────────────────────────


def seeds_of(loaders: list[Any], known: list[int]) -> list[int]:
    """The seeds of distributed samplers, also of those that loaders would have on several ranks.

    Where a loader has none, that is the `known` one, or else the one that Lightning would take.
    """
    by_lightning = int(os.environ.get("PL_GLOBAL_SEED", "0"))
    known = [*known, *[by_lightning] * len(loaders)]
    samplers = map(_distributed, loaders)
    return [known[i] if sampler is None else sampler.seed for i, sampler in enumerate(samplers)]


def give_seeds(loaders: list[Any], seeds: list[int]) -> None:
    """Have distributed samplers shuffle as those of the saved run, whatever this run's seed is."""
    for sampler, seed in zip(map(_distributed, loaders), seeds, strict=False):
        if sampler is not None:
            sampler.seed = seed


def _distributed(loader: Any) -> DistributedSampler[Any] | None:
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    sampler = sampler or getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, DistributedSampler) else None
