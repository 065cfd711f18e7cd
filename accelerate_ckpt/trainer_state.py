"""What a checkpoint of a Hugging Face Trainer holds, as one structure of live objects.

The model without wrappers (of adapters, only what is trained), optimizer, scheduler, scaler, and
what each rank has for itself: random state, the place in the data, the losses that were not logged
yet, buffers, and the small files that the Trainer itself would write.

Knows a Trainer's attributes. Knows nothing of storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accelerate_ckpt.hooks import Files
from accelerate_ckpt.loaders import Places
from accelerate_ckpt.moment import LateRandom
from accelerate_ckpt.state import Buffers
from accelerate_ckpt.wrappers import unwrapped
from torch_ckpt import ConfigError, PerRank, StateMismatch

KEY = "transformers"
"""The key under which a generation says that a Trainer saved it."""

BEST = "best_at_step"
"""The metric of generations whose model was the best so far: their step."""

_INSTEAD = "use DDP or one device, or the Trainer's own checkpoints"


def refuse_kind(trainer: Any) -> None:
    """Raise ConfigError for what cannot be saved, by name."""
    args = trainer.args
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    version = getattr(fsdp, "fsdp_version", 1)
    reasons = {
        "DeepSpeed": trainer.is_deepspeed_enabled and "it writes and reads its own files",
        f"FSDP{version}": trainer.is_fsdp_enabled and "it is not tested under the Trainer",
        "XLA FSDP": getattr(trainer, "is_fsdp_xla_enabled", False) and "XLA writes its own files",
        "a model sharded by from_pretrained": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        )
        and "the Trainer cannot resume it either",
    }
    for kind, reason in reasons.items():
        if reason:
            raise ConfigError(f"TrainerCheckpoint cannot save with {kind}: {reason}; {_INSTEAD}")
    if args.save_only_model:
        raise ConfigError(
            "save_only_model=True leaves nothing to resume from; leave it out, and write the model "
            "alone with `torch-ckpt export --to hf`"
        )
    if args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end":
        raise ConfigError(
            "TrainerCheckpoint does not push to the Hub while it trains: set hub_strategy='end'"
        )


def is_adapted(model: Any) -> bool:
    """Whether adapters (PEFT) are trained on a model that itself stays as it is."""
    kinds = {kind.__name__ for kind in type(model).__mro__}
    return bool({"PeftModel", "PeftMixedModel"} & kinds) or bool(
        getattr(model, "_hf_peft_config_loaded", False)
    )


class Weights:
    """The model's tensors, filled in place; of adapters only what is trained."""

    def __init__(self, trainer: Any) -> None:
        self._model = unwrapped(trainer.model)
        self._partial = is_adapted(self._model)

    def state_dict(self) -> dict[str, Any]:
        if not self._partial:
            return dict(self._model.state_dict())
        return {
            name: parameter.detach()
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        known = self.state_dict().keys()
        missing, surplus = sorted(known - state.keys()), sorted(state.keys() - known)
        if missing or surplus:
            raise StateMismatch(where="the generation", missing=missing, surplus=surplus)
        self._model.load_state_dict(state, strict=not self._partial)


class Received:
    """Takes whatever a generation holds."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing that could be filled in place."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state."""
        self.state = state


class Loop(Received):
    """What the Trainer has counted since it last logged."""

    @staticmethod
    def of(trainer: Any) -> dict[str, Any]:
        """As it is now; the sum is a tensor, which is on the device."""
        return {"loss": trainer._tr_loss, "logged": trainer._globalstep_last_logged}

    def reshard_state_dict(self, states: Any, rank: int, world_size: int) -> dict[str, Any]:
        """The mean over ranks, which is what is logged."""
        losses = torch.stack([torch.as_tensor(state["loss"]) for state in states])
        return {"loss": losses.mean(), "logged": states[0]["logged"]}

    def put_back(self, trainer: Any) -> None:
        """Go on counting; the mean loss that training returns is of the steps since the start."""
        if self.state:
            loss = self.state["loss"].to(trainer._tr_loss.device)
            trainer._tr_loss += loss
            trainer._total_loss_scalar -= loss.item()
            trainer._globalstep_last_logged = self.state["logged"]


class _Everything:
    def __contains__(self, key: object) -> bool:
        return True


class Layout(Files):
    """The small files; resuming needs none of them."""

    unread_keys = _Everything()


class Whole:
    """The state of a Trainer, ready to be saved or filled."""

    def __init__(self, trainer: Any, places: Places) -> None:
        self._trainer, self._places = trainer, places
        self.random, self.loop, self.files = LateRandom(), Loop(), Layout()
        self.buffers = Buffers(trainer.accelerator)
        self.header = Received()

    def to_save(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """The structure to save."""
        return self._structure(dict(header), Loop.of(self._trainer))

    def to_fill(self) -> dict[str, Any]:
        """The structure to load into."""
        return self._structure(self.header, self.loop)

    def _structure(self, header: Any, loop: Any) -> dict[str, Any]:
        trainer = self._trainer
        state: dict[str, Any] = {
            KEY: header,
            "model": Weights(trainer),
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler),
            "rank": PerRank(
                {
                    "random": self.random,
                    "places": self._places,
                    "loop": loop,
                    "buffers": self.buffers,
                    "files": self.files,
                }
            ),
        }
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        return state
