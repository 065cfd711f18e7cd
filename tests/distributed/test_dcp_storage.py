"""DCP's save, load and async_save on several ranks, through this package's storage."""

from __future__ import annotations

import json
import os
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.ranks import run_ranks
from torch_ckpt import (
    Checkpointer,
    DisagreementError,
    GenerationNotFound,
    IntegrityError,
    load_generation,
)
from torch_ckpt.cli.main import run as command
from torch_ckpt.dcp import Reader, Writer

_SIZES = (70, 300, 128, 41, 250, 17, 190, 333)

_ranks = partial(run_ranks, timeout_s=280)  # four imports of torch on two busy cores take a while


def _model(shape: tuple[int, ...], *, zero: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model with uneven and empty shards, after two steps."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 13), nn.LayerNorm(13), nn.Linear(13, 3))
    if shape:
        names = ("replicate", "shard")[-len(shape) :]
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        torch.manual_seed(10 + step)
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if zero:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    return model, optimizer


def _state(shape: tuple[int, ...], *, zero: bool = False) -> dict[str, Any]:
    model, optimizer = _model(shape, zero=zero)
    weights, moments = get_state_dict(model, optimizer)
    filled = torch.zeros if zero else torch.ones
    return {
        "model": weights,
        "optim": moments,
        "shared": [filled(size, 64) for size in _SIZES],
        "step": 0 if zero else 7,
        "schedule": None if zero else (1, ("warm", 2.5)),
        "note": [] if zero else ["a", 1, None],
    }


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, item in items for k, v in _flat(item, f"{path}.{key}").items()}
    return {path: value}


def _different(left: Any, right: Any) -> list[str]:
    """The paths at which two states differ."""
    one, two = _flat(left), _flat(right)
    return [
        key
        for key in sorted(one.keys() | two.keys())
        if type(one.get(key)) is not type(two.get(key))
        or not (
            torch.equal(one[key], two[key])
            if isinstance(one.get(key), torch.Tensor)
            else one.get(key) == two.get(key)
        )
    ]


def _parts(folder: Path) -> list[dict[str, Any]]:
    names = [part["name"] for part in json.loads((folder / "manifest.json").read_text())["parts"]]
    return [json.loads((folder / name).read_text()) for name in names]


def save_sharded(rank: int, root: str, oracle: str, shape: tuple[int, ...]) -> None:
    state = _state(shape)
    own = {f"rank{rank}": {"seed": rank, "noise": torch.full((3,), float(rank))}}
    dcp.save({**state, "own": own}, storage_writer=Writer(root), checkpoint_id=f"{root}/step-7")
    whole = _whole(state)
    if rank == 0:
        torch.save(whole, oracle)


def load_sharded(rank: int, root: str, oracle: str, shape: tuple[int, ...]) -> list[str]:
    state = _state(shape, zero=True)
    model, optimizer = _model(shape, zero=True)
    dcp.load(state, storage_reader=Reader(root))
    expected = torch.load(oracle, weights_only=False)
    different = _different(_whole(state), expected)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    weights, _ = get_state_dict(model, optimizer)
    return different + _different(_whole(weights), expected["model"])


def _succeeded(results: list[Any]) -> None:
    assert not [one for one in results if isinstance(one, BaseException)], results


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A root with what four FSDP ranks saved, and the same state unsharded."""
    folder = tmp_path_factory.mktemp("saved")
    root, oracle = folder / "run", folder / "oracle.pt"
    _succeeded(_ranks(folder / "ranks", save_sharded, 4, str(root), str(oracle), (4,)))
    return root, oracle


@pytest.mark.parametrize("ranks", [2, 1])
def test_what_four_ranks_saved_is_loaded_by_fewer(
    saved_by_four: tuple[Path, Path], tmp_path: Path, ranks: int
) -> None:
    root, oracle = saved_by_four
    results = _ranks(tmp_path / "ranks", load_sharded, ranks, str(root), str(oracle), (ranks,))
    assert results == [[]] * ranks


def test_what_four_ranks_saved_is_an_ordinary_generation(
    saved_by_four: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, oracle = saved_by_four
    expected = torch.load(oracle, weights_only=False)
    loaded = load_generation(root)
    own = loaded.pop("own")
    assert _different(loaded, expected) == []
    assert sorted(own) == ["rank0", "rank1", "rank2", "rank3"]
    assert [own[f"rank{rank}"]["seed"] for rank in range(4)] == [0, 1, 2, 3]
    live = _state((), zero=True)
    with Checkpointer(root) as checkpointer:
        live["own"] = {f"rank{rank}": {"seed": -1, "noise": torch.zeros(3)} for rank in range(4)}
        assert checkpointer.load(live).step == 7
    assert live.pop("own")["rank3"]["noise"].tolist() == [3.0, 3.0, 3.0]
    assert _different(live, expected) == []
    out = tmp_path / "out.safetensors"
    for words in (
        ["ls", root],
        ["show", root],
        ["verify", root],
        ["export", root, out, "--to", "safetensors"],
    ):
        assert command([str(word) for word in words]) == 0, capsys.readouterr()


def test_what_four_ranks_saved_is_loaded_by_dcp_without_ranks(
    saved_by_four: tuple[Path, Path],
) -> None:
    root, oracle = saved_by_four
    state = _state((), zero=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=Reader(root), checkpoint_id="7")
    assert _different(state, torch.load(oracle, weights_only=False)) == []


def test_every_rank_has_a_part_and_shared_tensors_are_written_once(
    saved_by_four: tuple[Path, Path],
) -> None:
    parts = _parts(saved_by_four[0] / "step-7")
    assert [part["rank"] for part in parts] == [0, 1, 2, 3]
    writers = [
        [part["rank"] for part in parts for one in part["tensors"] if one["name"] == f"shared.{i}"]
        for i in range(len(_SIZES))
    ]
    assert all(len(ranks) == 1 for ranks in writers), writers
    loads = [sum(block["raw_bytes"] for block in part["blocks"]) for part in parts]
    assert max(loads) <= 1.1 * sum(loads) / 4, loads


def save_replicas(rank: int, root: str, four: str, oracle: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layers = nn.Sequential(*(nn.Linear(64, 16 * size, bias=False) for size in range(1, 13)))
    fully_shard(layers, mesh=mesh)
    dcp.save({"model": layers.state_dict()}, storage_writer=Writer(root), checkpoint_id="1")
    return load_sharded(rank, four, oracle, (2, 2))


@pytest.mark.slow
def test_replicas_of_shards_load_and_are_shared_out_by_their_bytes(
    saved_by_four: tuple[Path, Path], tmp_path: Path
) -> None:
    root, (four, oracle) = tmp_path / "run", saved_by_four
    results = _ranks(tmp_path / "ranks", save_replicas, 4, str(root), str(four), str(oracle))
    assert results == [[]] * 4
    parts = _parts(root / "step-0000000001")
    loads = [sum(block["raw_bytes"] for block in part["blocks"]) for part in parts]
    assert sum(loads) == 4 * 64 * 16 * sum(range(1, 13)), "each shard once, not once a replica"
    assert max(loads) <= 1.1 * sum(loads) / 4, loads


class Dies(DefaultSavePlanner):
    """Kills its process when the third tensor is about to be copied."""

    left = 3

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type is not WriteItemType.BYTE_IO:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


class DiesBeforeCommit(Writer):
    """Kills its process when all ranks have voted and nothing is committed yet."""

    def finish(self, metadata: Any, results: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _plain(step: int) -> dict[str, Any]:
    return {"w": [torch.full((50, 64), float(step + i)) for i in range(12)], "step": step}


def save_then_die(rank: int, root: str, victim: int) -> str:
    dcp.save(_plain(1), storage_writer=Writer(root), checkpoint_id="1")
    planner = Dies() if rank == victim != 0 else DefaultSavePlanner()
    writer = DiesBeforeCommit(root) if victim == 0 else Writer(root)
    try:
        dcp.save(_plain(2), storage_writer=writer, checkpoint_id="2", planner=planner)
    except BaseException as error:
        return type(error).__name__
    return "saved"


@pytest.mark.parametrize("victim", [0, 1], ids=["coordinator", "other"])
def test_a_killed_rank_leaves_no_generation(tmp_path: Path, victim: int) -> None:
    root = tmp_path / "run"
    results = _ranks(tmp_path / "ranks", save_then_die, 2, str(root), victim)
    assert "exit code -9" in str(results[victim])
    assert results[1 - victim] != "saved"
    folder = root / "step-0000000002"
    left = sorted(path.name for path in folder.iterdir())
    assert left, "the kill came while files were being written"
    assert "manifest.json" not in left
    assert load_generation(root)["step"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no ranks
        dcp.save(_plain(2), storage_writer=Writer(root), checkpoint_id="2")
    assert load_generation(root)["step"] == 2
    assert not set(left) & {path.name for path in folder.iterdir()}, "leftovers are swept"


def _outcome(action: Any, *args: Any, **kwargs: Any) -> Any:
    """By rank, the kind and the text of what went wrong."""
    try:
        action(*args, **kwargs)
    except CheckpointException as error:
        return {rank: (type(one).__name__, str(one)) for rank, (one, _) in error.failures.items()}
    return None


def save_async(rank: int, root: str) -> list[int]:
    writer = Writer(root)
    seen = []
    for step in (1, 2):
        state = _plain(step)
        state["mine"] = {f"rank{rank}": step}
        pending: Any = dcp.async_save(state, storage_writer=writer, checkpoint_id=f"step-{step}")
        for tensor in state["w"]:
            tensor.fill_(-1)
        pending.result()
        seen.append(load_generation(root)["step"])
    return seen


def go_wrong(rank: int, folder: str) -> dict[str, Any]:
    """Several jobs in one, since starting ranks is what takes the time."""
    found: dict[str, Any] = {"async": save_async(rank, f"{folder}/async")}
    apart = Writer(f"{folder}/apart")
    found["apart"] = _outcome(
        dcp.save, _plain(1), storage_writer=apart, checkpoint_id=str(rank + 1)
    )
    nowhere = Reader(f"{folder}/nowhere")
    found["nowhere"] = _outcome(
        dcp.load, _plain(0), storage_reader=nowhere, checkpoint_id="step-500"
    )
    root = Path(folder, "damaged")
    save_sharded(rank, str(root), f"{folder}/oracle.pt", (2,))
    if rank == 0:
        found["shard"] = _flip(root / "step-7", "model.0.weight")
    dist.barrier()
    found["damaged"] = _outcome(dcp.load, _state((2,), zero=True), storage_reader=Reader(root))
    return found


def _flip(folder: Path, tensor: str) -> str:
    """Flip one bit of what rank 1 holds of a tensor; the file in which it is."""
    part = _parts(folder)[1]
    chunk = next(one["chunks"][0] for one in part["tensors"] if one["name"] == tensor)
    shard = folder / part["files"][0]["name"]
    with shard.open("r+b") as file:
        file.seek(part["blocks"][0]["offset"] + chunk["start"])
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return shard.name


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    results = _ranks(folder / "ranks", go_wrong, 2, str(folder))
    _succeeded(results)
    return folder, results


def test_one_flipped_bit_is_named_on_every_rank(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, results = two_ranks
    for result in results:
        kind, message = result["damaged"][1]
        assert kind == IntegrityError.__name__
        assert results[0]["shard"] in message
        assert "model.0.weight" in message
        assert "\n" not in message
    assert command(["verify", str(folder / "damaged")]) == 1


def test_async_save_in_a_thread_commits_what_was_staged(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, results = two_ranks
    assert [result["async"] for result in results] == [[1, 2], [1, 2]]
    root = folder / "async"
    manifests = []
    for step in (1, 2):
        loaded = load_generation(root, step=step)
        assert loaded.pop("mine") == {"rank0": step, "rank1": step}
        assert _different(loaded, _plain(step)) == []
        manifests.append(json.loads((root / f"step-{step}" / "manifest.json").read_text()))
    assert manifests[1]["run"] == manifests[0]["run"]
    assert manifests[1]["parent"] == {"step": 1, "attempt": manifests[0]["attempt"]}


def test_ranks_at_different_steps_save_nothing(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, results = two_ranks
    for result in results:
        kind, message = result["apart"][0]
        assert kind == DisagreementError.__name__
        assert "step 1 " in message
        assert "step 2 " in message
    assert not list((folder / "apart").glob("*"))


def test_a_generation_that_is_not_there_is_one_clear_line_on_every_rank(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    for result in two_ranks[1]:
        assert sorted(result["nowhere"]) == [0, 1]
        for kind, message in result["nowhere"].values():
            assert kind == GenerationNotFound.__name__
            assert "step-500" in message
            assert "\n" not in message
