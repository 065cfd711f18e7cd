"""A plain PyTorch loop, with no framework, that goes on after any crash, bit for bit.

    python examples/plain_loop.py --root run

Kill it and run the same command again. What has to come back is in one dictionary.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from torch_ckpt import Checkpointer, PerRank, RngState

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="folder of this run's checkpoints")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    random.seed(options.seed)
    np.random.seed(options.seed)
    torch.manual_seed(options.seed)
    inputs = torch.randn(4096, 64)
    targets = inputs.sin().sum(dim=1, keepdim=True)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    place = {"step": 0, "epoch": 0, "batch": 0}
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "random": PerRank(RngState()),  # each rank has its own
        "place": place,
    }

    with Checkpointer(options.root) as checkpointer:
        checkpointer.resume(state)  # None, and nothing changes, if there is nothing to resume
        if place["step"]:
            print(f"resumed at step {place['step']}", flush=True)
        while place["step"] < options.steps:
            shuffle = torch.Generator().manual_seed(options.seed + place["epoch"])
            batches = torch.randperm(len(inputs), generator=shuffle).split(BATCH)
            for batch in batches[place["batch"] :][: options.steps - place["step"]]:
                loss = F.mse_loss(model(inputs[batch]), targets[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                place["step"], place["batch"] = place["step"] + 1, place["batch"] + 1
                if place["step"] % options.save_every == 0 or place["step"] == options.steps:
                    checkpointer.save(state, place["step"])
                    print(f"step {place['step']}  loss {loss.item():.4f}", flush=True)
            place["epoch"], place["batch"] = place["epoch"] + 1, 0


if __name__ == "__main__":
    main()
