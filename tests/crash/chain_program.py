"""A trainer whose generations build on one another, and the states that it saves.

Knows the public surface of the engine.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tests.crash.programs import Logged, checkpointer, outcome
from tests.crash.run import Inside
from torch_ckpt.errors import CkptError

OPTIONS: dict[str, Any] = {"incremental": True, "full_every": 2, "codec": "zstd"}


def state_of(step: int) -> dict[str, Any]:
    """One block that never changes, one that changes a little, one that changes wholly."""
    generator = torch.Generator().manual_seed(step)
    return {
        "frozen": torch.arange(float(1 << 18)),
        "slow": torch.linspace(-1, 1, 1 << 18) + step * 1e-4,
        "fast": torch.randn(500, generator=generator).double(),
        "step": step,
    }


def differences(found: dict[str, Any], step: int) -> list[str]:
    """Keys whose values are not bit for bit those of a step."""
    wanted = state_of(step)
    return [
        name
        for name, want in wanted.items()
        if not (torch.equal(found[name], want) if name != "step" else found[name] == want)
    ]


def train(inside: Inside, root: str, steps: int) -> None:
    """Commit so many steps, then those that the test asks for; None ends the run."""
    Logged()
    saver = checkpointer(root, **OPTIONS)
    for step in range(1, steps + 1):
        outcome(saver, step, state_of(step))
    inside.say({"writer": saver.writer_pid})
    while (step := inside.hear()) is not None:
        inside.say(outcome(saver, step, state_of(step)))
    with contextlib.suppress(CkptError):
        saver.close()


def resume(inside: Inside, root: str, then: int) -> None:
    """Resume, say what was found, save two more steps, and end."""
    with checkpointer(root, **OPTIONS) as saver:
        state = state_of(0)
        found = saver.resume(state)
        step = None if found is None else found.step
        differs = [] if step is None else differences(state, step)
        inside.say({"step": step, "differs": differs, "writer": saver.writer_pid})
        for following in (then, then + 1):
            inside.say(outcome(saver, following, state_of(following)))
