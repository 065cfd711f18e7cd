"""The random state of this process: python, numpy, torch, and every CUDA device.

Knows generators. Knows nothing of storage, or of which ranks there are.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


class RngState:
    """Saves and restores all global random generators of this process.

    Give it to a checkpoint as `PerRank(RngState())`: every rank has its own, and gets it back.
    Where the number of ranks has changed, each gets one that is derived from all saved ones.
    """

    def state_dict(self) -> dict[str, Any]:
        """The present state of all generators."""
        state = _described(random.getstate(), np.random.get_state(), torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put all generators back.

        Raises:
            ValueError: the state has more CUDA devices than this process sees.
        """
        python, numpy = state["python"], state["numpy"]
        random.setstate(
            (
                python["version"],
                tuple(int(word) for word in python["internal"]),
                python["gauss"],
            )
        )
        np.random.set_state(
            (
                numpy["kind"],
                np.asarray(numpy["keys"], dtype=np.uint32),
                numpy["position"],
                numpy["has_gauss"],
                numpy["cached"],
            )
        )
        torch.set_rng_state(torch.as_tensor(state["torch"]).cpu())
        cuda = state.get("cuda")
        if cuda:
            if len(cuda) > torch.cuda.device_count():
                raise ValueError(
                    f"the saved random state has {len(cuda)} CUDA devices, this process sees "
                    f"{torch.cuda.device_count()}"
                )
            torch.cuda.set_rng_state_all([torch.as_tensor(item).cpu() for item in cuda])

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], rank: int, world_size: int
    ) -> dict[str, Any]:
        """A state for one of `world_size` ranks, from those of all ranks that were saved, in order.

        Always the same for the same saved states, rank and number of ranks, and another one for
        every rank. The generators of this process are left as they are.
        """
        digest = hashlib.sha256(f"rank {rank} of {world_size}".encode())
        for state in states:
            _hash(state, digest.update)
        seed = digest.digest()
        fresh = _described(
            random.Random(_number(seed, "python")).getstate(),
            np.random.RandomState(_words(seed, "numpy")).get_state(),
            torch.Generator().manual_seed(_number(seed, "torch")).get_state(),
        )
        saved_cuda = any(state.get("cuda") for state in states)
        if torch.cuda.is_available() and (saved_cuda or torch.cuda.is_initialized()):
            fresh["cuda"] = [
                torch.Generator(f"cuda:{index}")
                .manual_seed(_number(seed, f"cuda {index}"))
                .get_state()
                for index in range(torch.cuda.device_count())
            ]
        return fresh


def _described(python: tuple[Any, ...], numpy: Any, torch_state: torch.Tensor) -> dict[str, Any]:
    """The states of three generators, in plain containers, numbers, arrays and tensors."""
    version, internal, gauss = python
    kind, keys, position, has_gauss, cached = numpy
    return {
        "python": {
            "version": version,
            "internal": np.array(internal, dtype=np.uint32),
            "gauss": gauss,
        },
        "numpy": {
            "kind": str(kind),
            "keys": np.array(keys, dtype=np.uint32),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch_state,
    }


def _hash(value: Any, update: Callable[[bytes], object]) -> None:
    """Feed a state to a digest, so that unlike states never look alike."""
    if isinstance(value, dict):
        update(b"{%d" % len(value))
        for key in sorted(value):
            _hash(key, update)
            _hash(value[key], update)
    elif isinstance(value, list | tuple):
        update(b"[%d" % len(value))
        for item in value:
            _hash(item, update)
    else:
        if isinstance(value, torch.Tensor):
            value = value.cpu().numpy()
        data = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
        update(b"%d:" % len(data) + data)


def _words(seed: bytes, name: str) -> Any:
    """A seed for one generator, unlike that of any other, as eight words of 32 bits."""
    return np.frombuffer(hashlib.sha256(seed + name.encode()).digest(), dtype="<u4")


def _number(seed: bytes, name: str) -> int:
    """The same as a number of 63 bits."""
    return int.from_bytes(_words(seed, name).tobytes()[:8], "little") >> 1
