"""Incremental saves of states that the script trains itself: what the next generation stores.

A frozen GPT with low-rank adapters, a recommender with sparse embeddings, and GPT weights in
bfloat16 go through the engine; every file of a generation counts. Knows the public surface of
torch_ckpt. Holds no targets.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from codecs_job import GPT, trained
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrize

from torch_ckpt import Checkpointer

SAVES = 4
STEPS = 10
RANK = 4
PAIRS = 128
COLUMNS = ["state", "changes", "raw MB", "first MB", "next, largest MB", "ratio"]

Row = dict[str, Any]


class Case(NamedTuple):
    """A state, how to train it on by some steps, and what of it has changed by then."""

    state: dict[str, Any]
    train: Callable[[], object]
    changes: str


def measure_saves(*, quick: bool) -> dict[str, Row]:
    """Each case saved several times, some steps apart: bytes of the first and of the others."""
    cases = {
        "LoRA: frozen GPT, adapters": lora(quick=quick),
        "sparse-embedding recommender": recommender(quick=quick),
        "bfloat16 GPT, weights only": neighbours(quick=quick),
    }
    return {name: _saved(case) for name, case in cases.items()}


def lora(*, quick: bool) -> Case:
    """The MLPs' and the attention's matrices of a frozen GPT, each with an adapter of low rank."""
    torch.manual_seed(0)
    model = GPT(*((64, 1) if quick else (256, 6)))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, nn.TransformerEncoderLayer):
            for linear in (module.linear1, module.linear2, module.self_attn.out_proj):
                parametrize.register_parametrization(linear, "weight", LowRank(linear.weight))
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    share = sum(p.numel() for p in adapters) / sum(p.numel() for p in model.parameters())
    return Case(
        {"model": model, "optimizer": optimizer},
        _several(trained(model, optimizer)),
        f"adapters of rank {RANK}: {share:.1%} of the parameters",
    )


class LowRank(nn.Module):
    """Adds a product of two thin matrices to a frozen one."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(RANK, weight.shape[1]) / RANK)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


class Recommender(nn.Module):
    """Scores a user's taste for an item; most rows of its tables rest in any one step."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.users = nn.Embedding(users, 32, sparse=True)
        self.items = nn.Embedding(items, 32, sparse=True)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.users(users) * self.items(items)).sum(-1)


def recommender(*, quick: bool) -> Case:
    """Clicks made up with the popularity of items that Zipf's law gives, SparseAdam."""
    torch.manual_seed(0)
    model = Recommender(*((2000, 1000) if quick else (60_000, 30_000)))
    pairs = 8 if quick else PAIRS
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)
    popularity = 1 / torch.arange(1.0, model.items.num_embeddings + 1)

    def step() -> None:
        users = torch.randint(model.users.num_embeddings, (pairs,)).repeat(2)
        clicked = torch.multinomial(popularity, pairs, replacement=True)
        others = torch.randint(model.items.num_embeddings, (pairs,))
        wanted = torch.cat([torch.ones(pairs), torch.zeros(pairs)])
        scores = model(users, torch.cat([clicked, others]))
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(scores, wanted).backward()
        optimizer.step()

    step()
    rows = model.users.num_embeddings + model.items.num_embeddings
    most = 3 * pairs * STEPS / rows
    return Case(
        {"model": model, "optimizer": optimizer},
        lambda: [step() for _ in range(STEPS)],
        f"≤ {most:.1%} of the rows",
    )


def neighbours(*, quick: bool) -> Case:
    """The weights alone of a GPT that has trained in bfloat16 for a while."""
    torch.manual_seed(0)
    model = GPT(*((64, 1) if quick else (192, 5))).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    steps = trained(model, optimizer)
    for _ in range(20 if quick else 300):
        next(steps)
    return Case({"model": model}, _several(steps), "all weights, by little")


def _several(steps: Iterator[float]) -> Callable[[], object]:
    return lambda: [next(steps) for _ in range(STEPS)]


def _saved(case: Case) -> Row:
    """Save, train, save …; then read the newest back and compare every bit."""
    root = Path(tempfile.mkdtemp(prefix="codecs-", dir=Path.cwd()))
    sizes, raw_bytes = [], 0
    try:
        with closing(Checkpointer(root, incremental=True, keep=None)) as checkpointer:
            for number in range(SAVES):
                case.train()
                step = STEPS * (number + 1)
                pending = checkpointer.save(case.state, step, block="committed")
                files = [file for file in root.glob(f"step-*{step}/*") if file.is_file()]
                sizes.append(sum(file.stat().st_size for file in files))
                raw_bytes = pending.bytes
            kept = {
                name: tensor.clone() for name, tensor in case.state["model"].state_dict().items()
            }
            for tensor in case.state["model"].state_dict().values():
                tensor.zero_()
            checkpointer.load(case.state)
            for name, tensor in case.state["model"].state_dict().items():
                assert torch.equal(tensor, kept[name]), name
    finally:
        shutil.rmtree(root)
    return {
        "changes": case.changes,
        "raw_bytes": raw_bytes,
        "stored_bytes": sizes,
        "ratio": raw_bytes / max(sizes[1:]),
    }


def cells(name: str, row: Row) -> list[str]:
    """A row as text, in the order of `COLUMNS`."""
    sizes = [row["raw_bytes"], row["stored_bytes"][0], max(row["stored_bytes"][1:])]
    return [name, row["changes"], *(f"{size / 1e6:.2f}" for size in sizes), f"{row['ratio']:.1f}"]
