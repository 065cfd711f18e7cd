"""What is left of an epoch is known without reading it, and is dealt out without loss."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_ckpt.dealing import Rest, Share, place, rest_of, share_of
from lightning_ckpt.moment import moment

SIZE, BATCH = 23, 3
ALONE = Share(0, 1, drop_last=False)


def loader_of(**options: Any) -> DataLoader[int]:
    return DataLoader(range(SIZE), BATCH, **options)  # type: ignore[arg-type]


def found_after(batches: int, loader: DataLoader[int]) -> tuple[dict[str, Any], list[int]]:
    """The place after so many batches of an epoch, and the samples that followed."""
    before = moment([loader])
    iterator = iter(loader)
    first = moment([loader])
    drawn = [batch.tolist() for batch in iterator]
    found = place([loader], 1, batches=batches, under=(before, first), dealt=None)
    assert found is not None
    return found, list(chain(*drawn[batches:]))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_order_of_a_shuffled_loader_is_found_again(
    own: bool, workers: int, persistent: bool
) -> None:
    loader = loader_of(
        shuffle=True,
        generator=torch.Generator().manual_seed(1) if own else None,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
        multiprocessing_context="fork" if workers else None,
    )
    for _ in range(2):  # running workers are another case
        found, rest = found_after(4, loader)
        assert rest_of(found, ALONE) == rest
    del loader


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_of_a_distributed_sampler_is_found_again(shuffle: bool) -> None:
    sampler = DistributedSampler(range(SIZE), 1, 0, shuffle=shuffle, seed=7)  # type: ignore[arg-type]
    sampler.set_epoch(5)
    found, rest = found_after(4, loader_of(sampler=sampler))
    assert rest_of(found, ALONE) == rest


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 30])
@pytest.mark.parametrize("seen", [0, 1, 12, 22, 23, 24])
def test_every_sample_left_has_one_rank_and_all_ranks_have_as_many(ranks: int, seen: int) -> None:
    found = {"order": {"seed": 3}, "size": SIZE, "batch": 1, "seen": seen, "dealt": False}
    whole = rest_of({**found, "seen": 0}, ALONE)
    shares = [rest_of(found, Share(rank, ranks, drop_last=False)) for rank in range(ranks)]
    left = whole[seen:]
    assert len({len(share) for share in shares}) == 1
    dealt = [sample for turn in zip(*shares, strict=True) for sample in turn]
    assert dealt[: len(left)] == left
    assert len(dealt) - len(left) == (-len(left) % ranks if left else 0)
    full = [rest_of(found, Share(rank, ranks, drop_last=True)) for rank in range(ranks)]
    counts = Counter(sample for share in full for sample in share)
    assert set(counts.values()) <= {1}
    assert sum(counts.values()) == len(left) - len(left) % ranks


def test_loaders_that_do_not_share_an_order_are_told_apart() -> None:
    plain = loader_of()
    assert share_of([plain], 1) == ALONE
    assert share_of([plain], 2) is None  # each rank reads all of it
    assert share_of([plain, plain], 1) is None
    assert (
        share_of([loader_of(sampler=torch.utils.data.RandomSampler(range(SIZE), True))], 1) is None
    )
    assert share_of([loader_of(sampler=list(range(SIZE)))], 1) is None
    assert share_of([DataLoader(range(SIZE), batch_size=None)], 1) is None  # type: ignore[arg-type]

    class Own(BatchSampler):
        pass

    own = Own(SequentialSampler(range(SIZE)), BATCH, False)
    assert share_of([DataLoader(range(SIZE), batch_sampler=own)], 1) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_rest_is_given_once_and_then_whole_epochs(workers: int) -> None:
    context = "fork" if workers else None
    loader = loader_of(
        num_workers=workers, persistent_workers=workers > 0, multiprocessing_context=context
    )
    rest = Rest(loader, [[9, 4], [1]])
    iterator = iter(loader)
    rest.remove()
    assert [batch.tolist() for batch in iterator] == [[9, 4], [1]]
    assert list(chain(*(batch.tolist() for batch in loader))) == list(range(SIZE))
