"""`torch-ckpt import`: a checkpoint that another program wrote, as one generation of a run.

Knows arguments and the order of the steps: read all, look that the place is free, save, verify.
Knows nothing of the formats of others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torch_ckpt.cli.arguments import json_option, root_argument, storage_option
from torch_ckpt.cli.output import counted, note, print_json, print_line, print_table, size
from torch_ckpt.cli.places import NoSuchThing
from torch_ckpt.errors import FormatError, PickleRefused
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.verify import verify
from torch_ckpt.manifest.layout import LATEST, MANIFEST, check_name, folder_name, is_ours
from torch_ckpt.storage.store import Store, open_store

if TYPE_CHECKING:
    from torch_ckpt.foreign.checkpoint import Foreign

_METADATA = ".metadata"
_KINDS = {"dcp": "DCP", "lightning": "Lightning", "torch": "torch.save"}


@dataclass(frozen=True, kw_only=True)
class _Target:
    """Where the generation goes."""

    store: Store
    root: str
    storage_options: Mapping[str, Any]


@click.command("import")
@click.argument("source")
@root_argument
@click.option(
    "--step",
    type=click.IntRange(min=0, max=(1 << 62) - 1),
    help="The step it is of; otherwise the one that it holds, or that ends its name.",
)
@click.option("--folder", metavar="NAME", help="The generation's folder in place of step-….")
@click.option("--dry-run", is_flag=True, help="Read and check everything; write nothing.")
@click.option(
    "--allow-pickle",
    is_flag=True,
    help="Unpickle objects of other classes too; this runs code of whoever wrote SOURCE.",
)
@json_option
@storage_option
def import_(
    source: str,
    root: str,
    *,
    step: int | None,
    folder: str | None,
    dry_run: bool,
    allow_pickle: bool,
    as_json: bool,
    storage_options: Mapping[str, Any],
) -> None:
    """Bring a checkpoint of another program into the run at ROOT, as one generation.

    SOURCE is a folder of torch.distributed.checkpoint (with its .metadata), a .ckpt of Lightning,
    or any file of torch.save. It is read on this machine, whole, and never changed.
    """
    path = _source(source)
    target = _target(root, storage_options)
    if folder is not None or step is not None:
        _check_free(target, folder or folder_name(step or 0))  # before hours of reading
    found = _read(path, allow_pickle=allow_pickle)
    step = _step(found, path) if step is None else step
    folder = folder or folder_name(step)
    _check_free(target, folder)
    tensors, objects = _listing(found, path)
    document: dict[str, Any] = {
        "source": str(path),
        "format": found.kind,
        "root": target.store.url,
        "folder": folder,
        "step": step,
        "dry_run": dry_run,
        "tensors": len(tensors),
        "objects": objects,
        "bytes": sum(row[1] for row in tensors),
        "pickled": [],
    }
    if dry_run:
        document["pickled"] = _would_be_pickled(found)
    else:
        generation = _save(found, step, folder, target)
        document["bytes"] = generation.manifest.bytes
        document["pickled"] = _pickled(target.store, generation)
    if as_json:
        print_json(document)
        return
    if dry_run and tensors:
        rows = [[*words, size(count)] for words, count in tensors]
        print_table(("tensor", "dtype", "shape", "size"), rows, right=("size",))
    _print(document)


def _print(document: Mapping[str, Any]) -> None:
    what = f"{counted(document['tensors'], 'tensor')}, {counted(document['objects'], 'object')}, "
    what += size(document["bytes"])
    arrow = "would be" if document["dry_run"] else "->"
    print_line(
        f"{_KINDS[document['format']]} checkpoint {document['source']} ({what}) {arrow} step "
        f"{document['step']} of {document['root']} ({document['folder']})"
    )
    if document["pickled"]:
        note(f"loading it needs allow_pickle=True, for {', '.join(document['pickled'])}")


def _source(text: str) -> Path:
    if "://" in text:
        raise NoSuchThing(f"{text} is a URL; copy it to this machine first")
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if path.name == _METADATA:
        path = path.parent
    if not path.exists():
        raise NoSuchThing(f"{text} does not exist")
    if path.is_dir():
        if (path / MANIFEST).exists():
            raise NoSuchThing(f"{text} is a generation already; copy its folder")
        if not (path / _METADATA).is_file():
            raise NoSuchThing(
                f"{text} has no {_METADATA}: it is no checkpoint of torch.distributed.checkpoint, "
                "or one that was never finished"
            )
    elif not path.is_file():
        raise NoSuchThing(f"{text} is neither a file nor a folder")
    return path


def _target(root: str, storage_options: Mapping[str, Any]) -> _Target:
    if not root or root.startswith("memory:"):
        raise NoSuchThing(f"{root!r} is no ROOT; give the folder or URL of a run")
    store = open_store(root, storage_options)
    if store.capabilities.files and os.path.exists(store.url) and not os.path.isdir(store.url):
        raise NoSuchThing(f"{root} is a file; give a run's folder")
    for entry in store.entries(""):
        if entry.name in (MANIFEST, _METADATA) or is_ours(entry.name):
            raise NoSuchThing(f"{root} is one checkpoint; give a run's folder, which holds them")
    return _Target(store=store, root=root, storage_options=storage_options)


def _check_free(target: _Target, folder: str) -> None:
    """Refuse a place where anything is, but for what a save that crashed has left."""
    try:
        if check_name(folder, file="--folder") == LATEST:
            raise NoSuchThing(f"{folder!r} is a name of the run's own; give another")
    except FormatError as error:
        raise NoSuchThing(f"--folder {folder!r} is no plain name, without / in it") from error
    store, place = target.store, f"{target.store.url}/{folder}"
    names = [entry.name for entry in store.entries(folder)]
    if MANIFEST in names:
        raise NoSuchThing(
            f"{place} holds a generation already, which an import never replaces; "
            "give another name with --folder"
        )
    held = [name for name in names if not is_ours(name)]
    if store.capabilities.files and os.path.lexists(place):
        if os.path.islink(place) or not os.path.isdir(place):
            raise NoSuchThing(f"{place} is there and no folder; give another name with --folder")
        held += [name for name in os.listdir(place) if os.path.isdir(os.path.join(place, name))]
    if held:
        raise NoSuchThing(
            f"{place} holds other files ({', '.join(held[:3])}); give another name with --folder"
        )


def _read(path: Path, *, allow_pickle: bool) -> Foreign:
    # Here: torch takes seconds to import, which `--help` and a wrong path must not cost.
    from torch_ckpt.foreign.checkpoint import read_checkpoint

    if allow_pickle:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's own classes are here
    try:
        return read_checkpoint(path, allow_pickle=allow_pickle)
    except PickleRefused as error:
        shown = "; ".join(error.values[:5])
        more = f" and {len(error.values) - 5} more" if len(error.values) > 5 else ""
        raise NoSuchThing(
            f"{error.where} holds objects that are not only data: {shown}{more}; reading them can "
            "run code, so give --allow-pickle only if you trust who wrote it"
        ) from error


def _step(found: Foreign, path: Path) -> int:
    from torch_ckpt.foreign.checkpoint import find_step

    step = find_step(found.state, path)
    if step is None:
        raise NoSuchThing(f"{path} names no step, and its name ends with none; give --step")
    return step


def _listing(found: Foreign, path: Path) -> tuple[list[tuple[list[str], int]], int]:
    """A row for every tensor, with its bytes; and how many other values there are."""
    import torch

    from torch_ckpt.foreign.torch_file import leaves

    rows, objects = [], 0
    for name, value in leaves(found.state, str(path)):
        if isinstance(value, torch.Tensor):
            shape = "x".join(map(str, value.shape)) or "scalar"
            words = [name, str(value.dtype).removeprefix("torch."), shape]
            rows.append((words, value.numel() * value.element_size()))
        else:
            objects += 1
    return rows, objects


def _save(found: Foreign, step: int, folder: str, target: _Target) -> Generation:
    """Commit, and read every byte back.

    Raises:
        FormatError: what storage gives back is not what was written; the generation is gone.
    """
    from torch_ckpt.checkpointer import Checkpointer

    engine = Checkpointer(
        target.root,
        keep=None,
        slabs=1,
        distributed=False,
        storage_options=target.storage_options,
        framework=found.framework,
    )
    with engine:
        engine.save(found.state, step, folder=folder, block="committed")
    catalog = Catalog(target.store)
    generation = catalog.find(folder=folder)
    report = verify(target.store, generation)
    if not report.ok:
        damage = report.damages[0]
        catalog.delete(generation)
        raise FormatError(
            file=f"{generation.url}/{damage.file}",
            reason=f"was written, and at byte {damage.offset} {damage.reason}; it is removed again",
        )
    return generation


def _would_be_pickled(found: Foreign) -> list[str]:
    """What would have to be pickled; refuses what a generation cannot hold, as a save does."""
    from torch_ckpt.staging.objects import pickled
    from torch_ckpt.staging.tree import flatten

    return pickled(flatten(found.state).tree)


def _pickled(store: Store, generation: Generation) -> list[str]:
    from torch_ckpt.load import Opened
    from torch_ckpt.staging.objects import pickled

    return pickled(Opened(store, generation).tree)
