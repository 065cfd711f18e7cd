"""Training whose optimizer keeps moments, saves of it, and what a reader gets of those.

Any device can be told to be one from which moments are copied as codes. Knows the public surface
of the engine, and its codecs.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from tests import chains
from torch_ckpt import Checkpointer, load_generation
from torch_ckpt.codecs.fp8 import Fp8, Fp8Sqrt
from torch_ckpt.manifest.entries import BLOCK_BYTES
from torch_ckpt.pending import PendingSave
from torch_ckpt.staging import quantise

SHAPE = (1024, 600)
CODECS = {"exp_avg": Fp8(), "exp_avg_sq": Fp8Sqrt()}
WAIT_S = 60


def as_device(kind: str = "cpu") -> None:
    """From now on moments are copied as codes from this kind of device as well."""
    quantise.DEVICES = quantise.DEVICES | {kind}


class Run:
    """One parameter under AdamW; every step is the same for everybody who counts so far."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        shape: tuple[int, ...] = SHAPE,
    ) -> None:
        self.weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
        self.optimizer = torch.optim.AdamW([self.weight], lr=1e-3)
        self.saved: dict[int, dict[str, torch.Tensor]] = {}
        """The moments at every step that was saved."""

    @property
    def state(self) -> dict[str, Any]:
        return {"weight": self.weight, "optimizer": self.optimizer}

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """The live ones."""
        kept = self.optimizer.state[self.weight]
        return {name: kept[name] for name in CODECS}

    def step(self, number: int) -> None:
        """Train one step."""
        made = torch.Generator().manual_seed(number)
        gradient = torch.randn(self.weight.shape, generator=made)
        self.weight.grad = gradient.to(self.weight.device, self.weight.dtype)
        self.optimizer.step()

    def save(self, checkpointer: Checkpointer, number: int, **how: Any) -> PendingSave:
        """Train one step and save it."""
        self.step(number)
        return self.save_again(checkpointer, number, **how)

    def save_again(self, checkpointer: Checkpointer, number: int, **how: Any) -> PendingSave:
        """Save the state as it is."""
        self.saved[number] = {name: one.cpu().clone() for name, one in self.moments.items()}
        return checkpointer.save(self.state, number, **how)

    def saved_in(self, root: object, *numbers: int, **options: Any) -> list[PendingSave]:
        """Train and save steps, each of which is committed before the next one is saved."""
        done = []
        with Checkpointer(root, **{"moments": "fp8", "keep": None, **options}) as checkpointer:  # type: ignore[arg-type]
            for number in numbers:
                done.append(self.save(checkpointer, number))
                done[-1].wait(timeout_s=WAIT_S)
        return done


def loaded(root: object, number: int, **which: Any) -> dict[str, torch.Tensor]:
    """The moments of a stored step."""
    back = load_generation(root, number, **which)["optimizer"]["state"]  # type: ignore[arg-type]
    (kept,) = back.values()
    return {name: kept[name] for name in CODECS}


def as_read(name: str, moment: torch.Tensor) -> bytes:
    """What a reader gets of a moment that the writer alone has encoded."""
    raw, codec = chains.bits(moment), CODECS[name]
    dtype = str(moment.dtype).removeprefix("torch.")
    found = b""
    for start in range(0, len(raw), BLOCK_BYTES):
        block = memoryview(raw)[start : start + BLOCK_BYTES]
        stream = codec.encode(block, dtype=dtype)
        assert stream is not None
        found += bytes(codec.decode(memoryview(stream), raw_bytes=len(block)))
    return found


def digests(run: Run, number: int) -> dict[str, str]:
    """Of what a reader gets of a saved step."""
    return {
        name: hashlib.sha256(as_read(name, one)).hexdigest()
        for name, one in run.saved[number].items()
    }


def stored_digests(root: object, number: int) -> dict[str, str]:
    """Of what a reader does get."""
    return {
        name: hashlib.sha256(chains.bits(one)).hexdigest()
        for name, one in loaded(root, number).items()
    }


def assert_read(root: object, run: Run, number: int) -> None:
    """A step came back as if the writer had encoded what was saved, and not one bit otherwise."""
    back = loaded(root, number)
    for name, moment in run.saved[number].items():
        assert chains.bits(back[name]) == as_read(name, moment), name
        assert chains.bits(back[name]) != chains.bits(moment), "it does lose something"


def assert_exact(root: object, run: Run, number: int) -> None:
    """A step came back bit for bit."""
    chains.assert_same(loaded(root, number), run.saved[number])
