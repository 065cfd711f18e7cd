"""Ranks save one generation together, or learn together that they did not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from torch_ckpt import (
    Checkpointer,
    DisagreementError,
    PerRank,
    RngState,
    SaveFailed,
    UnsupportedState,
    load_generation,
)

_MB = 1 << 18


def _state(rank: int, step: int) -> dict[str, Any]:
    """Replicated tensors, and one that is each rank's own."""
    return {
        "weights": {f"w{i}": torch.full((2 * _MB,), float(step + i)) for i in range(4)},
        "buffer": torch.full((3,), float(step)),
        "step": step,
        "mine": PerRank({"rank": rank, "t": torch.full((5,), float(rank))}),
        "rng": PerRank(RngState()),
    }


def save_and_resume(rank: int, root: str) -> dict[str, Any]:
    torch.manual_seed(100 + rank)
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(_state(rank, step), step)
        checkpointer.wait()
    drawn = torch.rand(3)
    torch.manual_seed(0)
    state = _state(7, 0)
    with Checkpointer(root) as checkpointer:
        generation = checkpointer.resume(state)
        assert generation is not None
    return {
        "step": generation.step,
        "state": state["step"],
        "weights": [w.unique().tolist() for w in state["weights"].values()],
        "mine": state["mine"].value["rank"],
        "tensor": state["mine"].value["t"].unique().tolist(),
        "same stream": torch.equal(torch.rand(3), drawn),
    }


def test_two_ranks_share_a_generation_and_get_back_what_is_theirs(tmp_path: Path) -> None:
    root = tmp_path / "run"
    results = run_ranks(tmp_path / "ranks", save_and_resume, 2, str(root))
    for rank, result in enumerate(results):
        assert result == {
            "step": 2,
            "state": 2,
            "weights": [[2.0], [3.0], [4.0], [5.0]],
            "mine": rank,
            "tensor": [float(rank)],
            "same stream": True,
        }
    shards = sorted(p.stat().st_size for p in root.glob("step-0000000002/*.safetensors"))
    assert len(shards) == 2
    assert shards[1] < 1.1 * shards[0], "replicated tensors are written once, in equal shares"


def test_one_process_reads_what_two_ranks_wrote(tmp_path: Path) -> None:
    run_ranks(tmp_path / "ranks", save_and_resume, 2, str(tmp_path / "run"))
    loaded = load_generation(tmp_path / "run")
    assert [w.unique().tolist() for w in loaded["weights"].values()] == [[2.0], [3.0], [4.0], [5.0]]
    assert loaded["mine"]["rank"] == 0


def train_with_local_statistics(rank: int, root: str) -> list[torch.Tensor]:
    """DDP as it is by default but for the broadcast: statistics of each rank's own batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 100_000), torch.nn.BatchNorm1d(100_000))
    ddp = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp(torch.randn(4, 1) + rank).sum().backward()
    optimizer.step()
    with Checkpointer(root) as checkpointer:
        checkpointer.save({"model": model.state_dict()}, 1, optimizers=[optimizer])
    return [buffer.clone() for buffer in model.buffers()]


def test_of_buffers_that_differ_between_ranks_rank_0s_are_saved(tmp_path: Path) -> None:
    """400 kB each, and more than rank 0's fair share of the bytes is taken by parameters."""
    root = tmp_path / "run"
    first, second = run_ranks(tmp_path / "ranks", train_with_local_statistics, 2, str(root))
    assert not torch.equal(first[0], second[0])
    model = load_generation(root)["model"]
    saved = [value for name, value in model.items() if "running" in name or "tracked" in name]
    assert [torch.equal(*pair) for pair in zip(saved, first, strict=True)] == [True] * 3
    shards = [path.stat().st_size for path in root.glob("step-0000000001/*.safetensors")]
    assert len(shards) == 2
    assert max(shards) < 1.3 * min(shards)


class Codebook(torch.nn.Module):
    """Weights, and a large buffer that each rank changes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)
        self.register_buffer("codes", torch.zeros(1024, 600))
        self.frozen = torch.nn.Parameter(torch.ones(1024, 1024), requires_grad=False)


def save_large_buffers(rank: int, root: str, known: bool) -> None:
    torch.manual_seed(0)
    model = Codebook()
    model.get_buffer("codes").fill_(rank + 1.0)
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    with Checkpointer(root) as checkpointer:
        checkpointer.save({"model": model}, 1, optimizers=[optimizer] if known else [])


@pytest.mark.parametrize("known", [True, False])
def test_of_a_modules_large_buffers_rank_0s_are_saved_and_the_rest_is_shared_out(
    tmp_path: Path, known: bool
) -> None:
    root = tmp_path / "run"
    run_ranks(tmp_path / "ranks", save_large_buffers, 2, str(root), known)
    model = load_generation(root)["model"]
    assert torch.equal(model["codes"], torch.ones(1024, 600))
    assert torch.equal(model["frozen"], torch.ones(1024, 1024))
    shards = [path.stat().st_size for path in root.glob("step-0000000001/*.safetensors")]
    assert len(shards) == 2
    assert max(shards) < 1.1 * min(shards), "frozen weights are no buffers"


def different_steps(rank: int, root: str) -> str:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(_state(rank, 1), 1)
        try:
            checkpointer.save(_state(rank, 1), 1000 + rank)
        except DisagreementError as error:
            return str(error)
    return "saved"


def test_ranks_at_different_steps_are_told_both_steps(tmp_path: Path) -> None:
    results = run_ranks(tmp_path / "ranks", different_steps, 2, str(tmp_path / "run"))
    assert all("step 1000 and 1001" in result for result in results)
    assert [p.name for p in (tmp_path / "run").glob("step-*")] == ["step-0000000001"]


def different_folders(rank: int, root: str) -> str:
    with Checkpointer(root) as checkpointer:
        try:
            checkpointer.save(_state(rank, 1), 1, folder=f"best-{rank}")
        except DisagreementError as error:
            return str(error)
    return "saved"


def test_ranks_that_name_different_folders_are_told_at_once(tmp_path: Path) -> None:
    results = run_ranks(tmp_path / "ranks", different_folders, 2, str(tmp_path / "run"))
    assert all("do not save the same folder" in result for result in results)
    assert list((tmp_path / "run").glob("best-*")) == []


def refused_on_one(rank: int, root: str) -> str:
    state = {"t": torch.zeros(3) if rank else torch.zeros(3).to_sparse()}
    with Checkpointer(root) as checkpointer:
        try:
            checkpointer.save(state, 1)
        except (DisagreementError, UnsupportedState) as error:
            return type(error).__name__
    return "saved"


def test_a_state_that_one_rank_cannot_save_ends_the_save_on_all(tmp_path: Path) -> None:
    results = run_ranks(tmp_path / "ranks", refused_on_one, 2, str(tmp_path / "run"))
    assert results == ["UnsupportedState", "DisagreementError"]


def writer_of_one_dies(rank: int, root: str) -> list[str]:
    checkpointer = Checkpointer(root, commit_timeout_s=60)
    checkpointer.save(_state(rank, 1), 1, block="committed")
    victim = checkpointer.writer_pid if rank == 1 else None
    if victim is not None:
        os.kill(victim, signal.SIGSTOP)  # so that its share of step 2 is certainly not written
    second = checkpointer.save(_state(rank, 2), 2, block="staged")
    if victim is not None:
        os.kill(victim, signal.SIGKILL)
        while not second.done:
            time.sleep(0.05)
    dist.barrier()
    third = checkpointer.save(_state(rank, 3), 3)
    third.wait()
    try:
        checkpointer.close()
    except SaveFailed as error:
        return [second.state, third.state, type(error).__name__]
    return [second.state, third.state]


def test_a_generation_that_lacks_one_ranks_part_is_abandoned_and_the_next_commits(
    tmp_path: Path,
) -> None:
    results = run_ranks(tmp_path / "ranks", writer_of_one_dies, 2, str(tmp_path / "run"))
    assert results == [
        ["failed", "committed", "SaveFailed"],
        ["failed", "committed", "WriterDied"],
    ]
    root = tmp_path / "run"
    committed = sorted(p.parent.name for p in root.glob("*/manifest.json"))
    assert committed == ["step-0000000001", "step-0000000003"]


def resume_with_damage(rank: int, root: str) -> tuple[int, int]:
    state = _state(rank, 0)
    with Checkpointer(root) as checkpointer:
        generation = checkpointer.resume(state)
        assert generation is not None
    return generation.step, state["step"]


def test_all_ranks_step_back_together_from_damage(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_ranks(tmp_path / "ranks", save_and_resume, 2, str(root))
    shard = max(root.glob("step-0000000002/rank-00001.*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert run_ranks(tmp_path / "again", resume_with_damage, 2, str(root)) == [(1, 1), (1, 1)]


class _Unwilling:
    """A part of a state that cannot be asked for its own."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state today")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def one_raises(rank: int, root: str) -> tuple[str, bool]:
    state = {**_state(rank, 1), "extra": PerRank(_Unwilling() if rank == 0 else {})}
    began = time.monotonic()
    with Checkpointer(root, agree_timeout_s=60) as checkpointer:
        try:
            checkpointer.save(state, 1)
        except (DisagreementError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began < 30
    return "saved", False


def test_an_error_of_any_kind_on_one_rank_is_heard_on_all_at_once(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path / "ranks", one_raises, 2, str(tmp_path / "run"))
    assert first == ("RuntimeError: no state today", True)
    assert second[0].startswith("DisagreementError: rank 0 cannot save step 1")
    assert second[1]


def earlier_failure_raised(rank: int, root: str) -> tuple[str, bool]:
    checkpointer = Checkpointer(root, on_error="raise", agree_timeout_s=60, commit_timeout_s=60)
    checkpointer.save(_state(rank, 1), 1, block="committed")
    if rank == 1:
        victim = checkpointer.writer_pid
        assert victim is not None
        os.kill(victim, signal.SIGSTOP)
        pending = checkpointer.save(_state(rank, 2), 2, block="staged")
        os.kill(victim, signal.SIGKILL)
        while not pending.done:
            time.sleep(0.05)
    else:
        checkpointer.save(_state(rank, 2), 2, block="staged")
    dist.barrier()
    began = time.monotonic()
    try:
        checkpointer.save(_state(rank, 3), 3)
    except (DisagreementError, SaveFailed) as error:
        return type(error).__name__, time.monotonic() - began < 30
    return "saved", False


def test_a_failure_that_one_rank_raises_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    results = run_ranks(tmp_path / "ranks", earlier_failure_raised, 2, str(tmp_path / "run"))
    assert results == [("DisagreementError", True), ("WriterDied", True)]


def two_in_flight_fail(rank: int, root: str) -> tuple[list[str], str, bool]:
    checkpointer = Checkpointer(root, commit_timeout_s=100)
    checkpointer.save(_state(rank, 1), 1, block="committed")
    victim = checkpointer.writer_pid if rank == 1 else None
    if victim is not None:
        os.kill(victim, signal.SIGSTOP)
    lost = [checkpointer.save(_state(rank, step), step, block="staged") for step in (2, 3)]
    if victim is not None:
        os.kill(victim, signal.SIGKILL)
        while not all(one.done for one in lost):
            time.sleep(0.05)
    dist.barrier()
    began = time.monotonic()
    last = checkpointer.save(_state(rank, 4), 4)
    last.wait()
    quick = time.monotonic() - began < 50
    try:
        checkpointer.close()
    except SaveFailed:
        pass
    return [one.state for one in lost], last.state, quick


def test_every_save_that_a_rank_lost_is_abandoned_by_the_others(tmp_path: Path) -> None:
    results = run_ranks(tmp_path / "ranks", two_in_flight_fail, 2, str(tmp_path / "run"))
    assert results == [(["failed", "failed"], "committed", True)] * 2
