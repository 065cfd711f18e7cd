"""Checkpoints of DCP, whole and spoilt, and an object that shows whether it was unpickled."""

from __future__ import annotations

import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def training_state() -> dict[str, Any]:
    """A model and its optimizer after a step, with all that DCP keeps apart."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "train_state": {"step": torch.tensor(12), "losses": [0.5, float("inf")]},
        "schedule": [{}, {"last": torch.ones(2)}],
        "half": torch.randn(3, 2).to(torch.bfloat16),
        "small": torch.ones(2).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "name": "run 7",
        "nothing": None,
        "pair": (1, True),
    }


def save_dcp(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    """`dcp.save` of one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True, **options)
    return folder


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the metadata of a folder."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal bit for bit; an OrderedDict may have become a dict."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.numpy(force=True).tobytes() == other.numpy(force=True).tobytes()
            if one.dtype not in (torch.bfloat16, torch.float8_e4m3fn)
            else torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        )
    if isinstance(one, dict):
        kinds = {type(one), type(other)}
        return (
            (len(kinds) == 1 or kinds == {dict, OrderedDict})
            and list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other
