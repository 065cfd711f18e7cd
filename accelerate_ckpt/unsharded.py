"""Gradients under FSDP2: each rank's share, and those that are not reduced yet.

Within an accumulation that does not synchronize, `parameter.grad` is None: what each rank has
summed up of whole parameters waits in places that are FSDP2's own. Knows the insides of torch's
`fully_shard`. Knows nothing of Accelerate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torch_ckpt import UnsupportedState

_REMEDY = (
    "save after the last batch of an accumulation, or give the Accelerator "
    "GradientAccumulationPlugin(sync_each_batch=True)"
)


def waiting(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of whole parameters that wait for later batches, by parameter.

    Raises:
        UnsupportedState: this torch keeps them elsewhere, or they are sharded in another way too.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in _parameters(model):
        _check(name, parameter)
        gradient = parameter.unsharded_accumulated_grad
        if gradient is None and hasattr(parameter, "_unsharded_param"):
            gradient = parameter._unsharded_param.grad
        if isinstance(gradient, DTensor):
            what = "a gradient that waits for more batches under FSDP2 and tensor parallelism"
            raise UnsupportedState(key=f"gradients.{name}", what=what, remedy=_REMEDY)
        if gradient is not None:
            found[name] = gradient
    return found


def give(model: Any, saved: Mapping[str, torch.Tensor]) -> None:
    """Have these gradients wait, and no others; the next backward adds to them.

    Raises:
        UnsupportedState: there are some, and this torch keeps them elsewhere.
    """
    for name, parameter in _parameters(model):
        if saved:
            _check(name, parameter)
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
        gradient = saved.get(name)
        if gradient is not None:
            gradient = gradient.to(parameter.device)
        # Where one of another dtype would be, too, so it serves before the first all-gather.
        parameter.unsharded_accumulated_grad = gradient


def local_of(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's share of a gradient, which is all of it where nothing is sharded."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def placed_as(parameter: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter from this rank's share of it."""
    if not isinstance(parameter, DTensor):
        return share.to(parameter.device)
    return DTensor.from_local(
        share.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """What FSDP2 knows of each of its parameters, under a name that every run gives it."""
    for place, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # a torch that has one group for each module
            groups = [group for group in [getattr(state, "_fsdp_param_group", None)] if group]
        for number, group in enumerate(groups):
            for index, parameter in enumerate(group.fsdp_params):
                yield f"{place}:{number}.{index}", parameter


def _check(name: str, parameter: Any) -> None:
    if not hasattr(parameter, "unsharded_accumulated_grad"):
        what = f"sharded by the FSDP2 of torch {torch.__version__}, which is not known"
        raise UnsupportedState(key=f"gradients.{name}", what=what, remedy=_REMEDY)
