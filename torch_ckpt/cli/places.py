"""From what a user typed to a store and a generation in it.

Knows paths, URLs and the catalog. Knows nothing of what commands do with a generation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from torch_ckpt.errors import StorageError
from torch_ckpt.generations.catalog import SET_APART, Catalog, Generation
from torch_ckpt.generations.choose import choose
from torch_ckpt.manifest.layout import MANIFEST, is_ours, step_of_folder
from torch_ckpt.storage.store import Store, open_store

_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)(::.*)?://")


class Damaged(click.ClickException):
    """A generation whose manifest cannot be read; ends a command with code 1."""


class NoSuchThing(click.ClickException):
    """Something that was named is not there, or not of the right kind; code 2."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Place:
    """A run's root, and one folder in it if that was what the user named."""

    store: Store
    folder: str | None = None

    @property
    def catalog(self) -> Catalog:
        """The generations of the root."""
        return Catalog(self.store)

    @property
    def url(self) -> str:
        """What the user named, in full."""
        return f"{self.store.url}/{self.folder}" if self.folder else self.store.url

    def scan(self) -> tuple[list[Generation], list[tuple[str, str]]]:
        """Committed generations, newest first, and damaged folders with the reason."""
        committed, damaged = self.catalog.scan()
        if self.folder is None:
            return committed, damaged
        return (
            [one for one in committed if one.folder == self.folder],
            [one for one in damaged if one[0] == self.folder],
        )


def open_place(
    root: str, storage_options: Mapping[str, Any] | None = None, *, may_lack: bool = False
) -> Place:
    """The place at a path or URL; with `may_lack`, it need neither be there nor answer.

    Raises:
        NoSuchThing: there is nothing, or a file.
    """
    found = _URL.match(root)
    scheme = found["scheme"] if found else ""
    if scheme == "memory":
        raise NoSuchThing(f"{root} lives in the memory of the process that made it, not here")
    if scheme in ("", "file", "local"):
        path = root[found.end() :] if found else root
        return _local(path, root, storage_options, may_lack=may_lack)
    url = root.rstrip("/")
    store = open_store(url, storage_options)
    parent, _, folder = url.rpartition("/")
    try:
        one = _is_generation(store) or (may_lack and step_of_folder(folder) is not None)
    except StorageError:
        if not may_lack:
            raise
        one = step_of_folder(folder) is not None  # other tiers may answer
    if one:
        return Place(store=open_store(parent, storage_options), folder=folder)
    return Place(store=store)


def _local(
    path: str, shown: str, storage_options: Mapping[str, Any] | None, *, may_lack: bool
) -> Place:
    if not path:
        raise NoSuchThing("ROOT is empty; give the folder of a run")
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.islink(path):
        path = os.path.realpath(path)  # such as Lightning's last.ckpt
    if os.path.basename(path) == MANIFEST:
        path = os.path.dirname(path)
    if not os.path.lexists(path) and may_lack:
        parent, folder = os.path.split(path)
        if step_of_folder(folder) is not None:  # a generation that only another tier has
            return Place(store=open_store(parent, storage_options), folder=folder)
        return Place(store=open_store(path, storage_options))
    if not os.path.exists(path):
        raise NoSuchThing(f"{shown} does not exist")
    if not os.path.isdir(path):
        raise NoSuchThing(f"{shown} is a file; give a run's folder, or a generation's")
    store = open_store(path, storage_options)
    if _is_generation(store):
        parent, folder = os.path.split(path)
        return Place(store=open_store(parent), folder=folder)
    return Place(store=store)


def _is_generation(store: Store) -> bool:
    """Whether the root of a store is itself the folder of a generation, committed or not."""
    return any(entry.name == MANIFEST or is_ours(entry.name) for entry in store.entries(""))


def pick(place: Place, step: int | None) -> Generation:
    """The generation of a step; without one, the one that a run would resume from.

    Raises:
        GenerationNotFound: there is none; the message says what there is.
        Damaged: there is one, and its manifest cannot be read.
    """
    if place.folder is not None:
        return place.catalog.find(step=step, folder=place.folder)
    committed, damaged = place.scan()
    candidates = choose(committed, step)
    if candidates:
        return candidates[0]
    if step is None and committed:
        return committed[0]  # all are set apart, and there is no better one
    for folder, reason in damaged:
        if step is None or step_of_folder(folder) == step:
            raise Damaged(reason)
    return place.catalog.find(step=step)


def pick_only(place: Place, step: int | None) -> Generation:
    """The generation of a step or folder, to be changed: never one of several, nor by default.

    Raises:
        NoSuchThing: the step was left out, or has several generations.
        GenerationNotFound: there is none.
    """
    if place.folder is None:
        if step is None:
            raise NoSuchThing("say which generation: give its STEP, or its folder as ROOT")
        named = [one.folder for one in place.scan()[0] if one.step == step]
        if len(named) > 1:
            raise NoSuchThing(
                f"step {step} has {len(named)} generations; give one of their folders as ROOT: "
                + ", ".join(f"{place.store.url}/{name}" for name in named)
            )
    return pick(place, step)


def split_spec(spec: str) -> tuple[str, int | None]:
    """`ROOT@STEP`, or a place whose name may hold an @ itself."""
    root, at, step = spec.rpartition("@")
    if at and root and step.isascii() and step.isdigit() and not os.path.lexists(spec):
        return root, int(step)
    return spec, None


def state_of(generation: Generation) -> str:
    """What becomes of a committed generation, in a word or two."""
    for tag, word in SET_APART.items():
        if tag in generation.tags:
            return word
    return "committed"
