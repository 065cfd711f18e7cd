"""Trains a small transformer on the sources of Python's standard library, with the HF Trainer.

    python examples/hf_trainer.py --run run

Kill it at any moment and run it again: it goes on where it was, bit for bit as if it had not been
killed. All that does this is the one `TrainerCheckpoint` among the callbacks. Nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from accelerate_ckpt import TrainerCheckpoint


class Sources(Dataset[Any]):
    """Pieces of the standard library's text, as ASCII codes."""

    def __init__(self, length: int, files: int) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        paths = sorted(folder.glob("*.py"))[:files]
        text = "".join(path.read_text("utf-8", "replace") for path in paths)
        codes = torch.tensor(list(text.encode("ascii", "replace")))
        self.pieces = codes[: len(codes) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    """Train, or go on with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, help="optimizer steps")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--files", type=int, default=40, help="sources to read")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--resume-from", help="a folder for the Trainer, as export writes one")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    config = GPT2Config(
        vocab_size=128, n_positions=64, n_embd=options.width, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=str(options.run / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=10,
        save_steps=options.save_every,
        save_total_limit=3,
        logging_steps=10,
        dataloader_num_workers=options.workers,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Sources(64, options.files),
        callbacks=[TrainerCheckpoint(options.run / "checkpoints")],
    )
    trainer.train(resume_from_checkpoint=options.resume_from)
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    print(f"weights {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
