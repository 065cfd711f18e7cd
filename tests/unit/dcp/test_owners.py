"""Who writes what several ranks hold."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torch_ckpt.dcp.owners import balanced, bytes_of


def _tensor(name: str, size: int, *, at: int = 0, of: int | None = None) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([at]), torch.Size([size]))
    data = TensorWriteData(
        chunk, TensorProperties(dtype=torch.float32), torch.Size([of or at + size])
    )
    return WriteItem(MetadataIndex(name, [at]), WriteItemType.SHARD, tensor_data=data)


def _value(name: str) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def _names(plans: list[SavePlan]) -> list[list[str]]:
    return [[item.index.fqn for item in plan.items] for plan in plans]


def test_pieces_that_two_ranks_hold_are_weighed_by_their_own_bytes() -> None:
    # Two replicas of two shards each: the tensors are as large, the pieces are not.
    small = [_tensor(f"small{i}", 1, of=1000) for i in range(8)]
    large = _tensor("large", 8, of=1000)
    held = [item.index for item in [*small, large]]
    plans = balanced([SavePlan(small[:4]), SavePlan([*small[4:], large])], [held, held])
    assert sorted(sum(map(bytes_of, plan.items)) for plan in plans) == [32, 32]


def test_what_only_one_rank_holds_counts_and_stays() -> None:
    own, shared = _tensor("own", 15), [_tensor(f"s{i}", 5) for i in range(3)]
    held = [item.index for item in shared]
    before = [SavePlan([own, shared[2]]), SavePlan(shared[:2])]
    plans = balanced(before, [[own.index, *held], held])
    assert _names(plans) == [["own"], ["s0", "s1", "s2"]]


def test_values_go_to_the_lowest_rank_that_has_them() -> None:
    both, second = _value("both"), _value("second")
    plans = balanced(
        [SavePlan([]), SavePlan([both, second])], [[both.index], [both.index, second.index]]
    )
    assert _names(plans) == [["both"], ["second"]]


def test_a_planner_that_wants_the_lowest_rank_gets_it() -> None:
    shared = [_tensor(f"s{i}", 5) for i in range(4)]
    held = [item.index for item in shared]
    plans = balanced([SavePlan(shared), SavePlan([])], [held, held])
    assert _names(plans) == [["s0", "s1", "s2", "s3"], []]


def test_an_item_that_nobody_offered_stays_where_the_planner_put_it() -> None:
    plans = balanced([SavePlan([]), SavePlan([_tensor("made", 5), _value("up")])], [[], []])
    assert _names(plans) == [[], ["made", "up"]]
