"""A small GPT on the sources of Python's standard library, trained with Lightning.

    python examples/lightning_gpt.py --root run

Kill it whenever you like and run the same command again: it goes on where it was, bit for bit.
The line that does it is `CheckpointCallback(...)` in `main`; everything else is an ordinary script,
apart from what is noted for the comparison in `demo.py`: the samples of each step, and digests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - Lightning's own documentation calls it L
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset

from lightning_ckpt import CheckpointCallback
from torch_ckpt import RngState

CONTEXT = 64
"""Bytes that the model sees at once."""


class Sources(Dataset[tuple[Tensor, int]]):
    """Windows into the standard library's sources, each moved at random whenever it is read."""

    def __init__(self, windows: int) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.windows, self.stride = windows, (len(text) - CONTEXT - 1) // windows

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        start = index * self.stride + int(torch.randint(self.stride, ()))
        return self.text[start : start + CONTEXT + 1].long(), start


class GPT(L.LightningModule):
    """Predicts the next byte."""

    def __init__(self, journal: Path, steps: int, *, width: int = 160, layers: int = 4) -> None:
        super().__init__()
        self.journal, self.steps = journal, steps
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)
        self.head.weight = self.bytes.weight  # tied
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        hidden = self.bytes(text) + self.places(places)
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        text, starts = batch
        loss = F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        self.log("loss", loss)
        line = {"step": self.global_step + 1, "samples": starts.tolist(), "time": time.time()}
        with self.journal.open("a") as journal:
            journal.write(json.dumps(line) + "\n")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._warm_up_then_cosine)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def _warm_up_then_cosine(self, step: int) -> float:
        warm_up, done = max(1, self.steps // 10), min(1.0, step / self.steps)
        return min((step + 1) / warm_up, 0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def digest(value: Any) -> str:
    """One number for a nested state; equal only if every bit is."""
    if isinstance(value, Tensor | np.ndarray):
        array = np.ascontiguousarray(value.cpu() if isinstance(value, Tensor) else value)
        value = [str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
    elif isinstance(value, dict):
        value = [(key, digest(item)) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        value = [digest(item) for item in value]
    return hashlib.sha256(repr(value).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="folder of this run")
    parser.add_argument("--archive", metavar="URL", help="where checkpoints go on to")
    parser.add_argument("--cache", metavar="FOLDER", help="on this node's disk: the newest one")
    parser.add_argument("--log", type=Path, help="what torch-ckpt has to say")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--windows", type=int, default=4096, help="samples in an epoch")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)

    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    if options.log is not None:
        logging.getLogger("torch_ckpt").addHandler(logging.FileHandler(options.log))
        logging.getLogger("torch_ckpt").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    L.seed_everything(options.seed)
    checkpoints = options.root / "checkpoints"
    model = GPT(options.root / "samples.jsonl", options.steps)
    loader = DataLoader(Sources(options.windows), options.batch, shuffle=True, num_workers=2)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=options.steps,
        callbacks=[
            CheckpointCallback(
                checkpoints,
                archive=options.archive,
                cache=options.cache,
                every_n_steps=options.save_every,
            )
        ],
        logger=CSVLogger(options.root, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        deterministic=True,
        enable_progress_bar=sys.stdout.isatty(),
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    result = {
        "step": trainer.global_step,
        "weights": digest(model.state_dict()),
        "optimizer": digest(trainer.optimizers[0].state_dict()),
        "rng": digest(RngState().state_dict()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "blocked_s": float(trainer.logged_metrics["ckpt/blocked_s"]),
    }
    (options.root / "result.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
