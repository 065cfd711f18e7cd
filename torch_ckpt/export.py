"""The ways out: one generation as a safetensors file, or as the file that Lightning reads.

Every byte is verified on the way. Knows generations and the two file formats. Imports no
framework: a Lightning checkpoint is a dictionary.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

import torch

from torch_ckpt.errors import ConfigError, UnsupportedState
from torch_ckpt.load import Opened, load_fresh, read_tensors
from torch_ckpt.manifest.blocks import Piece, Placed, place, safetensors_header
from torch_ckpt.manifest.schema import Json
from torch_ckpt.staging.documents import names_in, per_rank_in
from torch_ckpt.storage.durable import sync_folder, write_all
from torch_ckpt.storage.failure import reported

BATCH_BYTES = 256 << 20
"""Tensors are read in groups of about this size; a larger one is a group of its own."""

_ADAPTER_KEY = "torch_ckpt"
"""What lightning_ckpt adds to a checkpoint for itself; of no use outside."""

_FRAMEWORKS = frozenset(["lightning", "pytorch_lightning", "lightning_fabric", "omegaconf"])
_CLASS_TAGS = ("$mapping", "$namedtuple", "$dataclass", "$enum", "$type")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    bytes: int
    tensors: int
    tied: Mapping[str, str]
    """Names that have no bytes of their own in the file, and the name that has them."""


def to_safetensors(
    opened: Opened, path: Path, *, force: bool = False, only: str = "", copy_tied: bool = False
) -> Exported:
    """Write the tensors of a generation to one safetensors file.

    Args:
        only: Leave out tensors whose names do not begin with this, and cut it off the others.
        copy_tied: Write a tied tensor under each of its names. Otherwise it is written once, and
            the file's metadata names the others, as `safetensors.torch.save_model` does.

    Raises:
        FileExistsError: there is a file and `force` is False.
        ConfigError: `only` leaves no tensor.
        UnsupportedState: two tensors would have one name in the file.
    """
    sources = {name[len(only) :]: name for name in _tensor_names(opened) if name.startswith(only)}
    sources.pop("", None)
    if only and not sources:
        raise ConfigError(f"{opened.generation.url} has no tensor whose name begins with {only!r}")
    tied = {} if copy_tied else _tied(opened, sources)
    pieces = [
        Piece(name, stored.dtype, stored.shape, (0,) * len(stored.shape), stored.shape)
        for name, source in sources.items()
        if name not in tied
        for stored in [opened.stored(source)]
    ]
    placed = place(pieces)
    header = _with_metadata(safetensors_header(placed), placed, tied)
    with _new_file(path, force=force) as file:
        write_all(file.fileno(), memoryview(header))
        for batch in _batches(placed):
            for data in _read(opened, batch, sources):
                write_all(file.fileno(), data)
        size = os.fstat(file.fileno()).st_size
    return Exported(path=path, bytes=size, tensors=len(placed), tied=tied)


def to_lightning(
    opened: Opened, path: Path, *, force: bool = False, allow_pickle: bool = False
) -> Exported:
    """Write a generation that Lightning saved as the `.ckpt` file that Lightning itself would.

    Raises:
        ConfigError: it holds no Lightning checkpoint.
        PickleRefused: it holds pickled values and `allow_pickle` is False.
        FileExistsError: there is a file and `force` is False.
    """
    tree = opened.tree
    if not isinstance(tree, dict) or not {"state_dict", "pytorch-lightning_version"} <= tree.keys():
        keys = ", ".join(list(tree)[:6]) if isinstance(tree, dict) else "no dict"
        raise ConfigError(
            f"{opened.generation.url} holds no Lightning checkpoint (its state: {keys}); "
            "export it to safetensors"
        )
    opened.tree = {key: value for key, value in tree.items() if key != _ADAPTER_KEY}
    missing = _import_frameworks(opened.tree)
    if missing:
        raise ConfigError(
            f"{opened.generation.url} holds objects of classes that {', '.join(missing)} defines; "
            f"import it first (`--import {missing[0]}`)"
        )
    # Beyond the last rank: what belongs to single ranks is not even looked at, unless it is used.
    rank = 0 if per_rank_in(opened.tree) else len(opened.parts)
    state = load_fresh(opened, rank=rank, allow_pickle=allow_pickle)
    with _new_file(path, force=force) as file:
        torch.save(state, file)
        file.flush()
        size = os.fstat(file.fileno()).st_size
    return Exported(path=path, bytes=size, tensors=len(names_in(opened.tree)), tied={})


def _import_frameworks(tree: Json) -> list[str]:
    """Import the frameworks whose classes a document names: reading it imports nothing.

    Returns the modules of other classes that are not loaded; importing these is the user's choice.
    """
    waiting, wanted = [tree], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            names = [node[tag] for tag in _CLASS_TAGS if isinstance(node.get(tag), str)]
            wanted |= {name.partition(":")[0] for name in names}
            wanted |= {"omegaconf"} if "$omegaconf" in node else set()
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    for module in sorted(wanted):
        if module.partition(".")[0] in _FRAMEWORKS:
            with suppress(ImportError):
                import_module(module)
    return sorted(wanted - sys.modules.keys())


def _tensor_names(opened: Opened) -> list[str]:
    """The names of all tensors of the state; not of arrays, bytes and pickles of objects."""
    names: dict[str, None] = {}
    waiting: list[Json] = [opened.tree]
    for part in opened.parts:
        waiting += part.per_rank.values()
    waiting.reverse()
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += reversed(node)
        elif isinstance(node, dict):
            if isinstance(name := node.get("$tensor"), str):
                names[name] = None
            waiting += reversed(node.values())
    return list(names)


def _tied(opened: Opened, sources: Mapping[str, str]) -> dict[str, str]:
    first: dict[str, str] = {}
    tied = {}
    for name, source in sources.items():
        kept = first.setdefault(opened.stored(source).name, name)
        if kept != name:
            tied[name] = kept
    return tied


def _with_metadata(header: bytes, placed: list[Placed], tied: Mapping[str, str]) -> bytes:
    """The header with tied names in its metadata, where other tools look for them."""
    document = json.loads(header[8:])
    if len(document) != len(placed) + 1:
        raise UnsupportedState(
            key="state", what="a tensor named __metadata__", remedy="export under another prefix"
        )
    document["__metadata__"] = {"format": "pt", **tied}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _batches(placed: list[Placed]) -> Iterator[list[Placed]]:
    batch: list[Placed] = []
    for item in placed:
        if batch and item.start + item.piece.bytes - batch[0].start > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _read(opened: Opened, batch: list[Placed], sources: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of a batch, each tensor's after the other's."""
    stored = {item.piece.name: opened.stored(sources[item.piece.name]) for item in batch}
    tensors = read_whole(opened, {one.name for one in stored.values()})
    for item in batch:
        tensor = tensors[stored[item.piece.name].name]
        if tensor.numel():
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


def read_whole(opened: Opened, names: set[str]) -> dict[str, torch.Tensor]:
    """Stored tensors in fresh memory, verified; `names` are those under which they are stored."""
    tensors = {}
    for name in names:
        stored = opened.stored(name)
        tensors[name] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    read_tensors(opened, {name: [tensor] for name, tensor in tensors.items()})
    return tensors


@contextmanager
def _new_file(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A file that appears under `path` whole and durable when the body is done, or not at all."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; give the name of a file", str(path))
    if not force and os.path.lexists(path):  # before hours of reading; asked again at the end
        raise _exists(path)
    beside = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    with reported("write", str(path)):
        try:
            with beside.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _publish(beside, path, force=force)
            sync_folder(str(path.absolute().parent))
        except FileExistsError as error:
            raise _exists(path) from error
        finally:
            with suppress(OSError):
                beside.unlink()


def _publish(beside: Path, path: Path, *, force: bool) -> None:
    if not force:
        try:
            os.link(beside, path)  # unlike a rename, never over a file that came meanwhile
            return
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            if os.path.lexists(path):
                raise FileExistsError(str(path)) from None
    os.replace(beside, path)


def _exists(path: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "exists; choose another name, or --force", str(path))
