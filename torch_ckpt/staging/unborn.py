"""State that an optimizer makes in its first step, made ready to be loaded before it.

Knows optimizers, DTensors and documents. Knows nothing of storage.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_ckpt.staging.documents import Stored, mapping_items
from torch_ckpt.staging.objects import Json
from torch_ckpt.staging.sharded import is_sharded


def unborn(
    document: Json, live: object, stored: Callable[[str], Stored]
) -> dict[str, torch.Tensor]:
    """Memory for state that optimizers will only make in their first step, by stored name.

    Of a parameter that is shared out over ranks it is shared out alike, so that no rank ever holds
    the whole, and the optimizer finds what it would have made. `live` is an optimizer, or
    containers that hold some.
    """
    if isinstance(live, torch.optim.Optimizer):
        return _of_one(document, live, stored)
    pairs: list[tuple[Json, object]] = []
    if isinstance(live, dict):
        pairs = [(item, live.get(key)) for key, item in mapping_items(document) or []]
    elif isinstance(live, list) and isinstance(document, list):
        pairs = list(zip(document, live, strict=False))
    made: dict[str, torch.Tensor] = {}
    for inner, value in pairs:
        made.update(unborn(inner, value, stored))
    return made


def _of_one(
    document: Json, optimizer: torch.optim.Optimizer, stored: Callable[[str], Stored]
) -> dict[str, torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = dict(mapping_items(document) or []).get("state")
    made: dict[str, torch.Tensor] = {}
    for index, values in mapping_items(states) or []:
        if type(index) is not int or not 0 <= index < len(parameters):
            continue
        parameter = parameters[index]
        if not is_sharded(parameter):
            continue
        born = optimizer.state.get(parameter, {})
        for key, value in mapping_items(values) or []:
            # Torch keeps its count of steps whole, also beside a parameter that is one number.
            if key == "step" or born.get(key) is not None:
                continue
            name = value.get("$tensor") if isinstance(value, dict) else None
            if name is not None and stored(name).shape == tuple(parameter.shape):
                dtype = getattr(torch, stored(name).dtype)
                made[name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return made
