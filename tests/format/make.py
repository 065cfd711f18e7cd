"""Makes the golden generations of this folder; run it for a new one only, never over an old one.

    python -m tests.format.make NAME

Every root has two or three generations and `expected.json`: the SHA-256 of the bytes of each tensor
as a reader must get them, by step. Values are plain arithmetic, the same with every torch.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from torch_ckpt import Checkpointer, load_generation

HERE = Path(__file__).parent
COUNT, LARGE = 1500, 1 << 18
"""Elements of a tensor; the large ones have blocks of their own, as rules need them."""
ROOTS: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"codec": "zstd"},
    "delta": {"codec": "zstd", "incremental": True},
    "lossy": {
        "codec": "zstd",
        "incremental": True,
        "moments": "fp8",
        "lossy_delta": {"*large": 1 / 16},
    },
}
"""Options of each root; `raw` is of torch-ckpt/1, the others of torch-ckpt/2."""


def state_of(step: int, *, large: bool) -> dict[str, Any]:
    """Tensors of many types, tied and identical ones, empty ones, and objects."""
    ramp = torch.arange(COUNT, dtype=torch.float64)
    wave = ((ramp * 7919) % 1009 - 504) / 509  # exact, and looks like noise
    grown = step * ((ramp * 31) % 17 - 8) / 4096
    weight = (wave + grown).float()
    more = torch.arange(LARGE if large else 0, dtype=torch.float64)
    wide = ((more * 7919) % 1009 - 504) / 509
    moved = step * ((more * 31) % 17 - 8) / 65536
    return {
        "model": {
            "weight": weight,
            "large": (wide + moved).float(),
            "tied": weight,
            "frozen": (wave * 3).float(),
            "twin": (wave * 3).float(),
            "half": (wave + grown).half(),
            "brain": (wave + grown).bfloat16(),
            "double": wave + grown,
            "complex": torch.complex(weight, -weight),
            "mask": (ramp % 3 == 0),
            "bytes": (ramp % 251).to(torch.uint8),
            "counts": (ramp * step).to(torch.int64),
            "scalar": torch.tensor(float(step)),
            "empty": torch.zeros(0, 3),
        },
        "optimizer": {
            "exp_avg": (wide / (64 + step)).float(),
            "exp_avg_sq": (wide * wide / (4096 + step)).float(),
        },
        "step": step,
        "note": ["golden", (step, None, 0.5)],
    }


def digests(state: dict[str, Any]) -> dict[str, str]:
    """The SHA-256 of every tensor's bytes, by name, and of the other values' text."""
    found = {}
    for group in ("model", "optimizer"):
        for name, tensor in state[group].items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[f"{group}.{name}"] = hashlib.sha256(data).hexdigest()
    text = repr((state["step"], state["note"]))
    return {**found, "objects": hashlib.sha256(text.encode()).hexdigest()}


def make(name: str) -> None:
    """Make one root.

    Raises:
        FileExistsError: it is there: what was released is never edited.
    """
    root = HERE / name
    root.mkdir()
    with Checkpointer(root, keep=None, **ROOTS[name]) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state_of(step, large=name == "lossy"), step).wait()
    expected = {str(step): digests(load_generation(root, step)) for step in (1, 2, 3)}
    (root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    make(sys.argv[1])
