"""`torch-ckpt export`: one generation as a file or folder that other tools read.

Knows arguments. Knows nothing of file formats.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import click

from torch_ckpt.cli.arguments import Where, json_option, root_argument, split_step, tier_options
from torch_ckpt.cli.output import counted, note, print_json, print_line, size
from torch_ckpt.cli.places import NoSuchThing
from torch_ckpt.cli.tiers import open_tiers


@click.command()
@root_argument
@click.argument("words", nargs=-1, metavar="[STEP] OUT")
@click.option(
    "--to",
    "kind",
    type=click.Choice(["safetensors", "lightning", "accelerate", "hf"]),
    required=True,
    help="safetensors: all tensors; lightning: the .ckpt that Lightning itself would write; "
    "accelerate: the folder that Accelerate's save_state would; hf: the one that a Hugging Face "
    "Trainer would, for from_pretrained and resume_from_checkpoint.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option(
    "--only",
    metavar="PREFIX",
    default="",
    help="safetensors: only tensors whose name begins so, without it; `state_dict.` for a model.",
)
@click.option("--copy-tied", is_flag=True, help="safetensors: tied tensors under every name.")
@click.option("--allow-pickle", is_flag=True, help="Unpickle objects; can run code.")
@click.option(
    "--import",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="Import it first, since it defines classes of saved objects. Repeatable.",
)
@json_option
@tier_options
def export(
    root: str,
    words: tuple[str, ...],
    *,
    kind: str,
    force: bool,
    only: str,
    copy_tied: bool,
    allow_pickle: bool,
    modules: tuple[str, ...],
    as_json: bool,
    where: Where,
) -> None:
    """Write one generation to the file (or folder) OUT, every byte verified.

    OUT appears when it is complete, and never replaces anything without --force.
    """
    step, out = split_step(words, "OUT")
    if kind != "safetensors" and (only or copy_tied):
        raise click.UsageError(
            "--only and --copy-tied are for --to safetensors", click.get_current_context()
        )
    found = open_tiers(root, where).pick(step)
    store, generation = found.store, found.generation
    _import(modules)
    # Here: torch takes seconds to import, which `--help` and a wrong path must not cost.
    from torch_ckpt.export import to_lightning, to_safetensors
    from torch_ckpt.export_accelerate import to_accelerate
    from torch_ckpt.export_hf import to_hf
    from torch_ckpt.load import Opened

    opened = Opened(store, generation)
    path = Path(out).expanduser()
    if kind == "safetensors":
        done = to_safetensors(opened, path, force=force, only=only, copy_tied=copy_tied)
    elif kind == "accelerate":
        done = to_accelerate(opened, path, force=force, allow_pickle=allow_pickle)
    elif kind == "hf":
        done = to_hf(opened, path, force=force, allow_pickle=allow_pickle)
    else:
        done = to_lightning(opened, path, force=force, allow_pickle=allow_pickle)
    unsafe = _unsafe(path) if kind == "lightning" else []
    if as_json:
        document = {
            "root": store.url,
            "folder": generation.folder,
            "step": generation.step,
            "out": str(path),
            "format": kind,
            "bytes": done.bytes,
            "tensors": done.tensors,
            "tied": dict(done.tied),
            "unsafe": unsafe,
        }
        print_json(document)
        return
    what = f"{counted(done.tensors, 'tensor')}, {size(done.bytes)}"
    print_line(f"step {generation.step} of {store.url} -> {path} ({what})")
    for name, kept in done.tied.items():
        print_line(f"tied: {name} is {kept}")
    if unsafe:
        note(f"loading it needs weights_only=False, for {', '.join(unsafe)}")


def _import(modules: tuple[str, ...]) -> None:
    if modules:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's own modules are here
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise NoSuchThing(f"cannot import {module}: {error}") from error


def _unsafe(path: Path) -> list[str]:
    """The classes for which `torch.load(weights_only=True)` would refuse the file."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    return sorted(get_unsafe_globals_in_checkpoint(str(path)))
