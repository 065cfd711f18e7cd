"""The tensors of a state, and one digest of them all, for runs that must end in the same bits."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def digest_of(tensors: list[torch.Tensor]) -> str:
    """One digest of the bytes of tensors, in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested containers, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
