"""FSDP2 under torchrun that goes on after any crash, on any number of processes.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # restarts need it: PyTorch's issue 135712
    torchrun --nproc-per-node 4 --max-restarts 3 examples/fsdp_elastic.py --root run

Kill a process and torchrun starts all of them again; kill everything and run the command again,
with another number of processes if you like. What has to come back is in one dictionary.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812

from torch_ckpt import Checkpointer, PerRank, RngState

CONTEXT = 48
"""Bytes that the model sees at once."""
BATCH = 12
"""Samples in a step, on all ranks together."""


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, *, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.bytes(text) + self.places(torch.arange(CONTEXT))
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.head(hidden.flatten(0, 1))


def source_text() -> Tensor:
    """The standard library's sources, as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(
        bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8
    )


def share_of_batch(text: Tensor, seed: int, step: int) -> Tensor:
    """This rank's samples of a step.

    The list of a step is the same whatever the number of ranks, and is dealt out to them: so there
    is no place in the data to save, and no sample is lost or seen twice.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
    mine = starts[dist.get_rank() :: dist.get_world_size()]
    return torch.stack([text[start : start + CONTEXT + 1] for start in mine.tolist()]).long()


def say(line: str) -> None:
    """Print a line in one piece: all ranks share one terminal."""
    print(f"{line}\n", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="folder of this run's checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > BATCH:
        parser.error(f"a step has {BATCH} samples; use at most so many processes")
    text = source_text()
    torch.manual_seed(options.seed)
    model = GPT()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    place: dict[str, Any] = {"step": 0, "losses": []}
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "random": PerRank(RngState()),  # each rank has its own; on other ranks it is derived anew
        "place": place,
    }

    with Checkpointer(options.root) as checkpointer:
        checkpointer.resume(state)  # the same step on every rank
        say(f"rank {rank} of {world_size}, process {os.getpid()}, at step {place['step']}")
        while place["step"] < options.steps:
            samples = share_of_batch(text, options.seed, place["step"])
            logits, targets = model(samples[:, :-1]), samples[:, 1:].flatten()
            loss = F.cross_entropy(logits, targets, reduction="sum") / (BATCH * CONTEXT)
            optimizer.zero_grad()
            (loss * world_size).backward()  # FSDP takes the mean over ranks; this makes it the sum
            optimizer.step()
            total = loss.detach()
            dist.all_reduce(total)
            place["losses"].append(total.item())
            place["step"] += 1
            if place["step"] % options.save_every == 0 or place["step"] == options.steps:
                checkpointer.save(state, place["step"])
                if rank == 0:
                    say(f"step {place['step']}  loss {total.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
