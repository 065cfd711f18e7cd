"""What a strategy's state is: whole, as Lightning collects it, or each rank's own shards.

A model-parallel strategy gathers or offloads what it hands to a checkpoint, which leaves nothing
to overlap, and asks for optimizer states in a way that makes a dummy step before the first real
one. So its module and its optimizers are asked themselves, and are filled themselves on the way
back, also where another number of ranks had saved. Knows strategies, modules, optimizers. Knows
nothing of storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_ckpt import ConfigError, StateMismatch

_SHARDED = "ModelParallelStrategy"
_USE_INSTEAD = "use ModelParallelStrategy (FSDP2, tensor parallelism), DDP or a single device"
_NOT_SERVED = {
    "FSDPStrategy": f"FSDP1 has flat parameters that it alone can take apart; {_USE_INSTEAD}",
    "DeepSpeedStrategy": f"DeepSpeed writes and reads its own files; {_USE_INSTEAD}",
    "XLAStrategy": "XLA writes and reads its own files",
    "SingleDeviceXLAStrategy": "XLA writes and reads its own files",
    "XLAFSDPStrategy": "XLA writes and reads its own files",
}
_WEIGHTS, _OPTIMIZERS = "state_dict", "optimizer_states"


def refuse_strategy(strategy: Any, *, who: str) -> None:
    """Raise ConfigError for a strategy whose state cannot be saved, by name."""
    for kind in type(strategy).__mro__:
        if kind.__name__ in _NOT_SERVED:
            raise ConfigError(
                f"{who} cannot save with {type(strategy).__name__}: {_NOT_SERVED[kind.__name__]}"
            )


def is_sharded(strategy: Any) -> bool:
    """Whether every rank has shards of its own."""
    return any(kind.__name__ == _SHARDED for kind in type(strategy).__mro__)


def refuse_averages(trainer: Any) -> None:
    """Raise ConfigError for a callback that puts other weights in place of those to resume from."""
    for callback in trainer.callbacks if is_sharded(trainer.strategy) else ():
        if any(kind.__name__ == "WeightAveraging" for kind in type(callback).__mro__):
            raise ConfigError(
                f"{type(callback).__name__} does not support sharded models; take it out, or use "
                "DDP or a single device"
            )


@contextmanager
def own_states(strategy: Any) -> Iterator[None]:
    """Have the strategy's checkpoints made of the live state of each rank, without a copy."""
    if not is_sharded(strategy):
        yield
        return
    strategy.lightning_module_state_dict = strategy.model.state_dict
    strategy.optimizer_state = lambda optimizer: unwrapped(optimizer).state_dict()
    try:
        yield
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state


def data_parallel(strategy: Any) -> tuple[int, int]:
    """This process among those that see different data, and how many of these there are.

    Processes that share the parts of one layer see the same data.
    """
    asked = getattr(strategy, "distributed_sampler_kwargs", None)
    return (asked["rank"], asked["num_replicas"]) if asked else (0, 1)


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that a `LightningOptimizer` stands for."""
    return getattr(optimizer, "optimizer", optimizer)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is in this process."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():  # otherwise an autograd function makes a view of it
        return to_local()


# ── the way back ──────────────────────────────────────────────────────────────────────────────


class Received:
    """Takes whatever a generation holds, as one dictionary of its own."""

    def __init__(self, *, unread: Sequence[str] = ()) -> None:
        self.state: dict[str, Any] = {}
        self.unread_keys = tuple(unread)

    def state_dict(self) -> dict[str, Any]:
        """Nothing that could be filled in place."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state."""
        self.state = state


class ReceivedShards(Received):
    """Has a module and its optimizers filled in place; takes the rest."""

    def __init__(
        self,
        module: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        unread: Sequence[str] = (),
    ) -> None:
        super().__init__(unread=(*unread, *(() if optimizers else (_OPTIMIZERS,))))
        self._module, self._optimizers = module, optimizers

    def state_dict(self) -> dict[str, Any]:
        """What is to be filled; the optimizers as objects, since some have no state yet."""
        weights = self._module.state_dict(keep_vars=True)
        return {_WEIGHTS: weights, _OPTIMIZERS: list(self._optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the rest, and put values of optimizers and modules that are no tensors in place.

        Raises:
            StateMismatch: the optimizers, or shapes or dtypes of shared out weights, do not fit.
        """
        weights, saved = state.pop(_WEIGHTS), state.pop(_OPTIMIZERS, ())
        if self._optimizers and len(saved) != len(self._optimizers):
            number = f"{_OPTIMIZERS} (saved {len(saved)}, now there are {len(self._optimizers)})"
            raise StateMismatch(where="the checkpoint", misshaped=[number])
        self._check_filled(weights)
        self._module.load_state_dict(weights, strict=getattr(self._module, "strict_loading", True))
        for optimizer, one in zip(self._optimizers, saved, strict=False):
            optimizer.load_state_dict(one)
        self.state = state

    def _check_filled(self, weights: Mapping[str, Any]) -> None:
        """A weight of which this rank has a part was filled, or nothing can be copied to it."""
        unfit = [
            f"{_WEIGHTS}.{name} (saved {_described(weights[name])}, given {_described(live)})"
            for name, live in self._module.state_dict(keep_vars=True).items()
            if hasattr(live, "to_local") and name in weights and weights[name] is not live
        ]
        if unfit:
            raise StateMismatch(where="the checkpoint", misshaped=unfit)


def _described(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def received(trainer: Any, *, unread: Sequence[str] = ()) -> Received:
    """What a generation is to be loaded into, for this trainer's stage."""
    strategy = trainer.strategy
    if not is_sharded(strategy):
        return Received(unread=unread)
    fits = trainer.state.fn.value == "fit"
    return ReceivedShards(
        strategy.model, list(map(unwrapped, trainer.optimizers)) if fits else [], unread=unread
    )
