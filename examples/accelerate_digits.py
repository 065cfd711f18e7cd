"""Learns handwritten digits with Accelerate. There is nothing of torch_ckpt in it.

    accelerate launch --cpu examples/accelerate_digits.py --project run
    accelerate-ckpt launch --cpu examples/accelerate_digits.py --project run

Both run this file as it is, and both go on where an earlier run was ended. Under the second, saves
are written behind training and verified, a kill at any moment costs nothing that was saved, and
the run goes on bit for bit as if it had not been killed.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset[Any]):
    """1,797 scans of 8 by 8 pixels, moved about at random when they are read."""

    def __init__(self) -> None:
        scans = load_digits()
        self.pixels = torch.tensor(scans.images, dtype=torch.float32) / 16  # type: ignore[attr-defined]
        self.labels = torch.tensor(scans.target)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        right, down = (int(torch.randint(-1, 2, ())) for _ in range(2))
        return torch.roll(self.pixels[index], (down, right), (0, 1))[None], self.labels[index]


class Progress:
    """Where the loop is. Registered, so that it is saved and loaded with the rest."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0
        self.right = 0.0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def main() -> None:
    """Train, or go on with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=10, help="batches")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()

    naming = ProjectConfiguration(
        project_dir=str(options.project), automatic_checkpoint_naming=True, total_limit=3
    )
    sampling = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(project_config=naming, dataloader_config=sampling)
    set_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
    loader = DataLoader(Digits(), 32, shuffle=True, num_workers=options.workers)
    model, optimizer, scheduler, loader = accelerator.prepare(net, optimizer, scheduler, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    try:
        accelerator.load_state()
        accelerator.print(f"goes on in epoch {progress.epoch} after batch {progress.batch}")
    except FileNotFoundError:
        accelerator.print("starts afresh")

    while progress.epoch < options.epochs:
        loader.set_epoch(progress.epoch)
        for pixels, labels in accelerator.skip_first_batches(loader, progress.batch):
            scores = model(pixels)
            loss = nn.functional.cross_entropy(scores, labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.batch += 1
            progress.right += float((scores.argmax(1) == labels).float().mean())
            if progress.batch % options.save_every == 0:
                accelerator.save_state()
        rate = progress.right / progress.batch
        accelerator.print(f"epoch {progress.epoch}: {rate:.1%} right", flush=True)
        progress.epoch, progress.batch, progress.right = progress.epoch + 1, 0, 0.0
    accelerator.wait_for_everyone()
    accelerator.save_state()
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    accelerator.print(f"weights {digest.hexdigest()[:16]}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
