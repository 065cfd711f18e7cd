"""What crashed saves and deletions leave behind, and its removal.

Knows names that only a save makes, and what manifests name. Knows nothing of which saves are
still running: the caller says which attempts to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch_ckpt.errors import FormatError, IntegrityError
from torch_ckpt.manifest.commit import read_manifest, read_part
from torch_ckpt.manifest.layout import attempt_of, is_ours, step_of_folder
from torch_ckpt.storage.store import Store

_UNREADABLE = (FormatError, IntegrityError)


def litter(store: Store, folders: Iterable[str]) -> list[str]:
    """Names (`folder/file`) that a save made and no manifest needs.

    Files of saves that are still running are among them. A folder whose manifest or parts cannot
    be read has no litter: nobody can tell what belongs to it.
    """
    return [f"{folder}/{name}" for folder in folders for name in _unnamed(store, folder)]


def sweep(store: Store, folder: str, *, spare: Callable[[str], bool] | None = None) -> list[str]:
    """Delete the litter of one folder, then the folder if it is empty; return the names.

    `spare` says of an attempt whether it may still be running in this folder; without it none is.
    It is asked about what is listed here, also about an attempt that has begun just now.
    """
    swept = _unnamed(store, folder, spare)
    for name in swept:
        store.delete(f"{folder}/{name}")
    # A save begins with an empty folder, so one that may be running needs it.
    if spare is None and (swept or step_of_folder(folder) is not None):
        store.delete_folder(folder)
    return swept


def sweep_deleted(store: Store, folder: str, attempts: Collection[str]) -> list[str]:
    """Delete what is left of generations whose deletion was cut; return the names.

    `attempts` were committed here once. The folder goes if nothing else is in it, so no save may
    be about to begin there.
    """
    left = _unnamed(store, folder)
    swept = [name for name in left if attempt_of(name) in attempts]
    for name in swept:
        store.delete(f"{folder}/{name}")
    if swept == left:
        store.delete_folder(folder)
    return swept


def _unnamed(store: Store, folder: str, spare: Callable[[str], bool] | None = None) -> list[str]:
    # Listed before the manifest is read: what a commit in between names is then never listed.
    names = [entry.name for entry in store.entries(folder)]
    ours = [name for name in names if is_ours(name)]
    if spare is not None:
        ours = [name for name in ours if (one := attempt_of(name)) is None or not spare(one)]
    if not ours:
        return []
    try:
        manifest = read_manifest(store, folder)
    except FileNotFoundError:
        return ours
    except _UNREADABLE:
        return []
    named: set[str] = set()
    for stored in manifest.parts:
        try:
            part = read_part(store, folder, stored)
        except (FileNotFoundError, *_UNREADABLE):
            return []
        named |= {stored.name, *(shard.name for shard in part.files)}
    return [name for name in ours if name not in named]
