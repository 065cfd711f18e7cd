"""What a coordinator does not let pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_ckpt import SaveFailed, UnsupportedState
from torch_ckpt.dcp import Writer
from torch_ckpt.dcp.orders import Vote
from torch_ckpt.dcp.tally import check_names, collect
from torch_ckpt.manifest.commit import publish_part
from torch_ckpt.manifest.layout import part_name
from torch_ckpt.manifest.schema import Part, StoredFile
from torch_ckpt.storage.store import open_store
from torch_ckpt.writer.job import Job

JOB = Job(
    root="/runs/7",
    folder="step-1",
    step=1,
    attempt="0123abcd",
    run="r",
    rank=0,
    world_size=2,
    created="",
    pieces=[],
    raw_bytes=0,
)


class Forgets(DefaultSavePlanner):
    """Plans half of a tensor."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        items = []
        for item in plans[0].items:
            data: Any = item.tensor_data
            chunk = replace(data.chunk, sizes=torch.Size([2]))
            items.append(replace(item, tensor_data=replace(data, chunk=chunk)))
        return [replace(plans[0], items=items)], metadata


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_that_is_not_planned_whole_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        state = {"half": torch.ones(4)}
        dcp.save(state, storage_writer=Writer(tmp_path), checkpoint_id="1", planner=Forgets())
    error = caught.value.failures[0][0]
    assert isinstance(error, UnsupportedState)
    assert "'half'" in str(error)
    assert not list(tmp_path.rglob("*"))


def _metadata(*tensors: str) -> Metadata:
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([1]), [])
    return Metadata({"array": BytesStorageMetadata(), **dict.fromkeys(tensors, tensor)})


def test_a_value_may_store_an_array_under_its_own_key() -> None:
    check_names(JOB, [Vote(0, None, 0, {"array": None}, ("array", "array.0"))], _metadata("w"))


@pytest.mark.parametrize(
    "votes",
    [
        [Vote(0, None, 0, {"a": None}, ("a.0",)), Vote(1, None, 0, {"b": None}, ("a.0",))],
        [Vote(0, None, 0), Vote(1, None, 0, {"w": None}, ("w.0",))],
    ],
    ids=["two values", "a value and a tensor"],
)
def test_one_name_for_two_things_on_two_ranks_is_refused(votes: list[Vote]) -> None:
    with pytest.raises(SaveFailed, match="rename one"):
        check_names(JOB, votes, _metadata("w.0"))


def test_a_part_that_is_missing_or_not_the_voted_one_names_its_rank(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    voted = StoredFile(name=part_name(1, JOB.attempt), bytes=2, sha256="0" * 64)
    with pytest.raises(SaveFailed, match="rank 1 does not count: it did not vote"):
        collect(store, JOB, [Vote(0, None, 0)])
    with pytest.raises(SaveFailed, match="rank 1 does not count: it is not there"):
        collect(store, JOB, [Vote(0, None, 0), Vote(1, voted, 0)])
    part = Part(
        step=1, attempt=JOB.attempt, run="r", rank=1, world_size=2, files=(), blocks=(), tensors=()
    )
    store.make_folder(JOB.folder)
    published = publish_part(store, JOB.folder, part)
    assert collect(store, JOB, [Vote(0, None, 0), Vote(1, published, 0)]) == [published]
    with pytest.raises(SaveFailed, match="its digest is not the voted one"):
        collect(store, JOB, [Vote(0, None, 0), Vote(1, voted, 0)])
