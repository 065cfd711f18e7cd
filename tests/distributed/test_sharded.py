"""States that are shared out over ranks come back under any other sharding, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import sharded_job
from tests.distributed.ranks import run_ranks
from torch_ckpt import Checkpointer, load_generation
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.local import LocalStore


def save_trained(rank: int, root: str, how: str) -> None:
    model, optimizer = sharded_job.build(how)
    sharded_job.train(model, optimizer, 2)
    state = {"model": model, "optimizer": optimizer, "step": 2}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(state, 2)
        checkpointer.wait()
    truth = sharded_job.whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    if rank == 0:
        torch.save(truth, Path(root) / "truth.pt")


def load_and_compare(rank: int, root: str, how: str) -> dict[str, Any]:
    model, optimizer = sharded_job.build(how)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with Checkpointer(root) as checkpointer:
        generation = checkpointer.resume(state)
    found = sharded_job.whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    truth = torch.load(Path(root) / "truth.pt")
    losses = sharded_job.train(model, optimizer, 1)
    return {
        "step": generation.step if generation else None,
        "differs": sharded_job.equal(truth, found),
        "losses": losses,
    }


CASES = [
    (4, "fsdp", [(4, "fsdp"), (2, "fsdp"), (3, "fsdp"), (1, "whole")]),
    (4, "hsdp", [(2, "tp"), (3, "fsdp")]),
    (4, "fsdp-tp", [(2, "fsdp"), (4, "hsdp"), (1, "whole")]),
    (2, "tp", [(4, "fsdp-tp")]),
    (2, "whole", [(3, "fsdp")]),
]


MESHES: dict[str, Any] = {
    "whole": None,
    "fsdp": [{"shape": [4], "names": None}],
    "hsdp": [{"shape": [2, 2], "names": ["copies", "shards"]}],
    "tp": [{"shape": [2], "names": ["tp"]}],
    "fsdp-tp": [{"shape": [2, 2], "names": ["dp", "tp"]}, {"shape": [2], "names": ["dp"]}],
}


@pytest.mark.parametrize(("world", "how", "back"), CASES, ids=[f"{h}-{w}" for w, h, _ in CASES])
def test_a_sharded_state_comes_back_under_any_other_sharding(
    tmp_path: Path, world: int, how: str, back: list[tuple[int, str]]
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    results = run_ranks(tmp_path / "saved", save_trained, world, str(root), how)
    assert results == [None] * world
    store = LocalStore(str(root))
    (generation,) = Catalog(store).committed()
    assert verify(store, generation).ok
    assert generation.manifest.mesh == MESHES[how]
    truth = torch.load(root / "truth.pt")
    plain = load_generation(root)
    assert sharded_job.equal(truth["model"], sharded_job.whole(plain["model"])) == []
    for number, (ranks, into) in enumerate(back):
        folder = tmp_path / f"loaded-{number}"
        for result in run_ranks(folder, load_and_compare, ranks, str(root), into):
            assert isinstance(result, dict), result
            assert result["step"] == 2
            assert result["differs"] == [], (ranks, into)
