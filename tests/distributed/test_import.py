"""What FSDP2 and tensor parallel ranks wrote with DCP becomes whole tensors in one generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.distributed.ranks import run_ranks
from tests.unit.foreign.samples import same
from torch_ckpt import load_generation
from torch_ckpt.cli.main import run


def train_and_save(rank: int, folder: str, parallel: int) -> Any:
    """A step of a sharded model, saved by `dcp.save`; rank 0 gives the whole state."""
    world = torch.distributed.get_world_size()
    torch.manual_seed(0)
    # one row in the last layer, so that some shards are empty; odd lengths, so they are unequal
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 10, bias=False), torch.nn.ReLU(), torch.nn.Linear(10, 1)
    )
    if parallel > 1:
        mesh = init_device_mesh("cpu", (world // parallel, parallel), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 33, "same": torch.ones(2)}
    state[f"of_rank_{rank}"] = rank
    dcp.save(state, checkpoint_id=folder)
    whole = _whole(state)
    whole.update({f"of_rank_{other}": other for other in range(world)})
    return whole if rank == 0 else None


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("world_size", "parallel"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_an_import_of_sharded_ranks_holds_the_whole_state(
    tmp_path: Path, world_size: int, parallel: int
) -> None:
    source, root = tmp_path / "source", tmp_path / "run"
    expected, *others = run_ranks(
        tmp_path / "ranks", train_and_save, world_size, str(source), parallel
    )
    assert others == [None] * (world_size - 1), expected
    assert len(list(source.glob("*.distcp"))) == world_size

    assert run(["import", str(source), str(root)]) == 0

    loaded = load_generation(root, 33)
    assert loaded.keys() == expected.keys()
    assert all(same(loaded[key], expected[key]) for key in expected)
