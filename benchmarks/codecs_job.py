"""States to encode: a small GPT trained on the sources of Python's standard library with AdamW.

Knows torch alone. Knows nothing of codecs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

CONTEXT = 64
BATCH = 8
BLOCK_BYTES = 8 << 20
DATA = ("weights", "exp_avg", "exp_avg_sq")
RATES = {"float32": 1e-3, "bfloat16": 3e-4}


class Snapshot(NamedTuple):
    """What one step left, as the blocks a writer would get."""

    step: int
    loss: float
    blocks: dict[str, list[memoryview]]


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        mask = torch.full((CONTEXT, CONTEXT), float("-inf"), dtype=hidden.dtype).triu(1)
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def train(dtype: str, steps: list[int], *, width: int, layers: int) -> Iterator[Snapshot]:
    """Train in `dtype` throughout and give what each of `steps` left."""
    torch.manual_seed(0)
    model = GPT(width, layers).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[dtype], weight_decay=0.1)
    for step, loss in zip(range(1, max(steps) + 1), trained(model, optimizer), strict=False):
        if step in steps:
            yield Snapshot(step, loss, _blocks(model, optimizer))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """Take steps for ever; the loss of each."""
    torch.set_num_threads(1)  # the same sums everywhere, and no waiting on a busy machine
    while True:
        optimizer.zero_grad()
        loss = loss_of(model, torch.randint(len(sources()) - CONTEXT - 1, (BATCH,)))
        loss.backward()
        optimizer.step()
        yield float(loss.detach())


def loss_of(model: nn.Module, starts: Tensor) -> Tensor:
    """How badly a model predicts the pieces of the sources that begin there."""
    text = sources()
    batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    logits = model(batch[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(logits, batch[:, 1:].flatten())


@functools.cache
def sources() -> Tensor:
    """The sources of Python's standard library as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _blocks(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[memoryview]]:
    found = {}
    for name in DATA:
        tensors = [
            parameter if name == "weights" else optimizer.state[parameter][name]
            for parameter in model.parameters()
        ]
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors]).view(torch.uint8)
        raw = memoryview(np.ascontiguousarray(flat.numpy()).tobytes())
        found[name] = [raw[at : at + BLOCK_BYTES] for at in range(0, len(raw), BLOCK_BYTES)]
    return found
