"""What a save copies now, and what it may copy while training goes on until the fence.

Knows plans and who owns memory. Knows nothing of slabs or of how anything is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from torch_ckpt.sharding.plan import Plan
from torch_ckpt.staging.ownership import Owned
from torch_ckpt.staging.snapshot import Source
from torch_ckpt.staging.tree import Flat

_TENSOR = {torch.Tensor}
_requires_grad = attrgetter("requires_grad")


def sources_of(
    flat: Flat, plan: Plan, owners: Sequence[torch.optim.Optimizer] | None
) -> tuple[list[Source], list[Source]]:
    """The pieces of a plan that are copied now, and those that may be copied until the fence.

    `owners` own memory beside the optimizers in the state; None has all copied now.
    """
    lives = [flat.tensors[name] for name in plan.names]
    owned = [False] * len(lives)
    if owners is not None:
        owned = Owned([*owners, *flat.optimizers]).which(lives)
    if not set(map(type, lives)) <= _TENSOR or any(map(_requires_grad, lives)):
        # An alias of the storage: a framework may swap what a parameter points to.
        lives = [live.detach() for live in lives]
    for position, cut in plan.cuts.items():
        lives[position] = lives[position].narrow(*cut)
    sources = list(map(Source, plan.names, lives, plan.placed))
    eager = [source for source, late in zip(sources, owned, strict=True) if not late]
    lazy = [source for source, late in zip(sources, owned, strict=True) if late]
    return eager, lazy
