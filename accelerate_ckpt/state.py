"""What a checkpoint of an Accelerator holds, as one structure of live objects.

Models without the wrappers that a process group or a compiler puts around them, optimizers and
schedulers without Accelerate's, the scaler, registered objects, and what each rank has for itself:
random state, the place in the data, gradients that wait for more batches, files of hooks.

Knows an Accelerator's lists. Knows nothing of storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accelerate_ckpt.hooks import Files
from accelerate_ckpt.loaders import Places
from accelerate_ckpt.moment import LateRandom
from accelerate_ckpt.unsharded import give, local_of, placed_as, waiting
from accelerate_ckpt.wrappers import unwrapped
from torch_ckpt import ConfigError, PerRank, StateMismatch

KIND = "accelerate"
"""The key under which a generation says that an Accelerator saved it."""

_NOT_SERVED = {
    "DEEPSPEED": "DeepSpeed writes and reads its own files",
    "MEGATRON_LM": "Megatron-LM writes and reads its own files",
    "XLA": "XLA writes and reads its own files",
}
_INSTEAD = "use DDP, FSDP2 (fsdp_version 2) or one device, or Accelerate's own save_state"


def refuse_kind(accelerator: Any) -> None:
    """Raise ConfigError for a way of distributing that cannot be saved, by name."""
    kind = str(accelerator.distributed_type).rpartition(".")[2].upper()
    reason = _NOT_SERVED.get(kind)
    if kind == "FSDP" and not accelerator.is_fsdp2:
        reason = "FSDP1 has flat parameters that it alone can take apart"
    if reason is not None:
        raise ConfigError(f"accelerate_ckpt cannot save with {kind}: {reason}; {_INSTEAD}")


class Models:
    """The models; a generation may lack those that a hook has saved its own way."""

    def __init__(self, models: list[Any]) -> None:
        self.models = [unwrapped(model) for model in models]
        self.strict = True
        self.absent: list[int] = []
        """Those that the loaded generation lacks."""

    def state_dict(self, **kwargs: Any) -> dict[str, Any]:
        return {str(n): model.state_dict(**kwargs) for n, model in enumerate(self.models)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        known = {str(n) for n in range(len(self.models))}
        if surplus := sorted(set(state) - known):
            raise StateMismatch(
                where="the generation",
                surplus=[f"models.{name}" for name in surplus],
            )
        self.absent = []
        for number, model in enumerate(self.models):
            if str(number) in state:
                model.load_state_dict(state[str(number)], strict=self.strict)
            else:
                self.absent.append(number)


class Gradients:
    """Gradients that wait for later batches; there are some only within an accumulation."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        if self._accelerator.sync_gradients:
            return {}
        found = {
            name: local_of(parameter.grad)
            for name, parameter in self._parameters().items()
            if parameter.grad is not None
        }
        for number, model in enumerate(self._accelerator._models):
            unsharded = waiting(unwrapped(model))
            found |= {f"{number}.{name}": gradient for name, gradient in unsharded.items()}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state

    def reshard_state_dict(self, states: Any, rank: int, world_size: int) -> dict[str, Any]:
        """Nothing: the sum over ranks cannot be told apart by rank any more."""
        return {}

    def put_back(self) -> None:
        """Give parameters the gradients that were loaded, and no others."""
        for name, parameter in self._parameters().items():
            saved = self.loaded.get(name)
            parameter.grad = None if saved is None else placed_as(parameter, saved)
        for number, model in enumerate(self._accelerator._models):
            prefix = f"{number}."
            give(
                unwrapped(model),
                {
                    name.removeprefix(prefix): gradient
                    for name, gradient in self.loaded.items()
                    if name.startswith(prefix)
                },
            )
        self.loaded = {}

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {
            f"{number}.{name}": parameter
            for number, model in enumerate(self._accelerator._models)
            for name, parameter in unwrapped(model).named_parameters()
        }


class Buffers:
    """Buffers of models that every rank has a copy of, which need not be alike.

    Batch statistics differ between ranks until the next forward pass takes those of rank 0; the
    engine, which takes copies for equal, may have saved those of any rank.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {name: buffer.clone() for name, buffer in self._buffers().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state

    def reshard_state_dict(self, states: Any, rank: int, world_size: int) -> dict[str, Any]:
        """Those of rank 0."""
        return dict(states[0])

    def put_back(self) -> None:
        """Give each model this rank's own."""
        for name, buffer in self._buffers().items():
            if name in self.loaded:
                buffer.copy_(self.loaded[name])
        self.loaded = {}

    def _buffers(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        several = self._accelerator.num_processes > 1
        for number, model in enumerate(self._accelerator._models if several else ()):
            plain = unwrapped(model)
            saved = plain.state_dict().keys()
            for name, buffer in plain.named_buffers():
                if name in saved and not isinstance(buffer, DTensor):
                    found[f"{number}.{name}"] = buffer
        return found


class Whole:
    """The state of an Accelerator, ready to be saved or filled."""

    def __init__(self, accelerator: Any, places: Places) -> None:
        self._accelerator, self._places = accelerator, places
        self.models = Models(accelerator._models)
        self.random, self.gradients = LateRandom(), Gradients(accelerator)
        self.buffers = Buffers(accelerator)
        self.files = Files()
        self.header: dict[str, Any] = {}

    def to_save(self, *, header: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
        """The structure to save; `weights` by number of model, where hooks were asked."""
        return self._structure(dict(header), weights)

    def to_fill(self) -> dict[str, Any]:
        """The structure to load into."""
        self.header = {}
        return self._structure(_Header(self), self.models)

    def _structure(self, header: Any, models: Any) -> dict[str, Any]:
        accelerator = self._accelerator
        state: dict[str, Any] = {
            KIND: header,
            "models": models,
            "optimizers": [_inner(one, "optimizer") for one in accelerator._optimizers],
            "schedulers": [_inner(one, "scheduler") for one in accelerator._schedulers],
            "custom": list(accelerator._custom_objects),
            "rank": PerRank(
                {
                    "random": self.random,
                    "places": self._places,
                    "gradients": self.gradients,
                    "buffers": self.buffers,
                    "files": self.files,
                }
            ),
        }
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler
        return state


class _Header:
    """Takes the header of a generation, whatever it says."""

    def __init__(self, whole: Whole) -> None:
        self._whole = whole

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._whole.header = state


def _inner(wrapped: Any, name: str) -> Any:
    """What Accelerate has wrapped: the engine copies a real optimizer's tensors behind training."""
    return getattr(wrapped, name, wrapped)
