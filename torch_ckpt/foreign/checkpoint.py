"""One checkpoint of another program as a state: a DCP folder, or a file of `torch.save`.

Knows which kinds there are, how Lightning names things in each, and where a step is written.
Knows nothing of generations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torch_ckpt.errors import FormatError, PickleRefused
from torch_ckpt.foreign.metadata import FILE, Contents, Extent, StoredTensor, read_contents
from torch_ckpt.foreign.nesting import nested
from torch_ckpt.foreign.torch_file import load_bytes, load_file
from torch_ckpt.staging.snapshot import copy_exactly

Kind = Literal["dcp", "lightning", "torch"]

LIGHTNING_VERSION = "pytorch-lightning_version"
"""The key that every checkpoint of Lightning's trainer has."""

_LIGHTNING_REST = "meta.pt"
"""What Lightning writes beside a DCP checkpoint: all but model and optimizers."""

_STEP_PATHS = (("global_step",), ("step",), ("train_state", "step"), ("iteration",))
_TRAILING = re.compile(r"(?<![\d.])\d{1,18}$")
"""Not the decimals of a metric."""

_TWIN = re.compile(r"-v\d+$")
"""How Lightning tells files of one step apart."""

_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".tar", ".distcp")


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """What was read."""

    kind: Kind
    state: Any

    @property
    def framework(self) -> dict[str, str]:
        """Names and versions that it records."""
        version = self.state.get(LIGHTNING_VERSION) if isinstance(self.state, dict) else None
        return {"lightning": version} if isinstance(version, str) else {}


def read_checkpoint(source: Path, *, allow_pickle: bool = False) -> Foreign:
    """The whole state of a checkpoint on the CPU, checked.

    Tensors of a file are views of it, read when they are used; those of a folder are in memory.

    Raises:
        PickleRefused: it holds objects of other classes than data, which are named.
        FormatError: it is damaged, hostile, or of no known kind.
        ConfigError: unpickling was allowed, and a class cannot be imported.
        OSError: it cannot be read.
    """
    if source.is_dir():
        state = _read_folder(source, allow_pickle=allow_pickle)
    else:
        state = load_file(source, allow_pickle=allow_pickle)
    lightning = isinstance(state, dict) and {LIGHTNING_VERSION, "state_dict"} <= state.keys()
    kind: Kind = "lightning" if lightning else "dcp" if source.is_dir() else "torch"
    return Foreign(kind=kind, state=state)


def find_step(state: Any, source: Path) -> int | None:
    """The step that a state names, or else the number at the end of its name; None if neither."""
    for path in _STEP_PATHS:
        value = state
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
            value = value.item()
        if type(value) is int and value >= 0:
            return value
    name = source.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    found = _TRAILING.search(_TWIN.sub("", name))
    return int(found[0]) if found else None


def _read_folder(folder: Path, *, allow_pickle: bool) -> dict[Any, Any]:
    contents = read_contents(folder)
    leaves: dict[str, Any] = _objects(folder, contents, allow_pickle=allow_pickle)
    beside = folder / _LIGHTNING_REST
    rest = load_file(beside, allow_pickle=allow_pickle) if beside.is_file() else None
    for name, tensor in contents.tensors.items():
        leaves[name] = _tensor(folder, name, tensor)
    state = nested(leaves, contents.paths, str(folder / FILE))
    return state if rest is None else _with_rest(state, rest, str(beside))


def _objects(folder: Path, contents: Contents, *, allow_pickle: bool) -> dict[str, Any]:
    """All that are no tensors; first, so that a refusal does not wait for terabytes."""
    found, refused = {}, []
    for name, extent in contents.objects.items():
        where = f"{folder / extent.file} ({name})"
        try:
            found[name] = load_bytes(_read(folder, extent), where, allow_pickle=allow_pickle)
        except PickleRefused as error:
            refused.append(f"{name} ({', '.join(error.values)})")
    if refused:
        raise PickleRefused(where=str(folder), values=refused)
    return found


def _tensor(folder: Path, name: str, stored: StoredTensor) -> torch.Tensor:
    whole = None
    for chunk in stored.chunks:
        where = f"{folder / chunk.extent.file} ({name})"
        try:
            part = load_bytes(_read(folder, chunk.extent), where, allow_pickle=False)
        except PickleRefused as error:
            # Tensors need no pickle, so permission for objects is none for this.
            raise FormatError(
                file=where, reason=f"holds {', '.join(error.values)} where a tensor should be"
            ) from error
        fits = type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout is torch.strided
        if (
            not fits
            or part.dtype is not getattr(torch, stored.dtype, None)
            or tuple(part.shape) != chunk.shape
        ):
            raise FormatError(
                file=where,
                reason=f"holds something else than {stored.dtype}{list(chunk.shape)}",
            )
        part = part.detach()
        if chunk.shape == stored.shape:
            return part
        if whole is None:
            whole = torch.empty(stored.shape, dtype=part.dtype)
        region = whole
        for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
            region = region.narrow(dim, offset, length)
        copy_exactly(region, part)
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype)) if whole is None else whole


def _read(folder: Path, extent: Extent) -> bytes:
    path = folder / extent.file
    with path.open("rb") as file:
        file.seek(extent.offset)
        data = file.read(extent.bytes)
    if len(data) < extent.bytes:
        raise FormatError(file=str(path), reason="became shorter while it was read")
    return data


def _with_rest(state: dict[Any, Any], rest: Any, where: str) -> dict[Any, Any]:
    """One dictionary, laid out as in a `.ckpt` file of Lightning's."""
    if not isinstance(rest, dict):
        raise FormatError(file=where, reason="holds no dictionary")
    if both := [key for key in state if key in rest]:
        raise FormatError(file=where, reason=f"{both[0]!r} is in it and in {FILE} too")
    if LIGHTNING_VERSION not in rest or "model" not in state:
        return {**rest, **state}  # as Fabric's users laid it out
    optimizers = [key for key in state if re.fullmatch(r"optimizer_[0-9]+", str(key))]
    whole = {**rest, "state_dict": state.pop("model")}
    if optimizers:
        optimizers.sort(key=lambda key: int(key.removeprefix("optimizer_")))
        whole["optimizer_states"] = [state.pop(key) for key in optimizers]
    return {**whole, **state}
