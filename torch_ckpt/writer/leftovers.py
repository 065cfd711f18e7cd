"""What a try that failed leaves in its folder: who removes it, and when nobody needs it any more.

Files carry rank and attempt in their names, so a try can only ever remove its own. Knows names
and stores. Knows nothing of how a save is done.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch_ckpt.errors import CkptError
from torch_ckpt.generations.litter import sweep
from torch_ckpt.manifest.attempts import is_earlier, is_stale
from torch_ckpt.manifest.layout import attempt_of, part_name, refusal_name, shard_name
from torch_ckpt.storage.store import Store

logger = logging.getLogger(__name__)

REFUSAL_LIMIT_BYTES = 4096


def withdraw(store: Store, folder: str, rank: int, attempt: str) -> None:
    """Free what one rank's share took; nobody may have counted its vote."""
    shards = [shard_name(rank, attempt, encoded=encoded) for encoded in (False, True)]
    _delete(store, folder, (part_name(rank, attempt), *shards))


def withdraw_all(store: Store, folder: str, attempt: str) -> None:
    """Free what all ranks' shares took, for the coordinator, which will publish no manifest.

    On a full disk the next save needs that room. What a rank writes later goes when that begins.
    """
    try:
        names = [entry.name for entry in store.entries(folder)]
    except (CkptError, OSError) as error:
        logger.warning("left the files of attempt %s in %s behind: %s", attempt, folder, error)
        return
    _delete(store, folder, [name for name in names if attempt_of(name) == attempt])
    try:
        store.delete_folder(folder)
    except OSError as error:
        logger.debug("left %s behind: %s", folder, error)


def refuse(store: Store, folder: str, rank: int, attempt: str, reason: str) -> None:
    """Tell the coordinator not to wait for this rank, unless its vote is there and may count.

    Where even that cannot be written, the coordinator waits in vain until its time is over.
    """
    text = " ".join(reason.split()).encode("utf-8", "replace")[:REFUSAL_LIMIT_BYTES]
    try:
        if any(entry.name == part_name(rank, attempt) for entry in store.entries(folder)):
            return
        store.put(f"{folder}/{refusal_name(rank, attempt)}", text)
    except (CkptError, OSError) as error:
        logger.debug("could not refuse attempt %s in %s: %s", attempt, folder, error)


def refusal(store: Store, folder: str, rank: int, attempt: str) -> str:
    """The reason that a rank gave."""
    try:
        text = store.get(f"{folder}/{refusal_name(rank, attempt)}", limit=REFUSAL_LIMIT_BYTES)
    except (CkptError, OSError):
        return "it gave up"
    printable = "".join(c if c.isprintable() else "?" for c in text.decode("utf-8", "replace"))
    return printable or "it gave up"


def sweep_own(store: Store, folder: str, attempt: str) -> None:
    """Drop what earlier tries left in the folder that `attempt` has just committed."""
    names = [entry.name for entry in store.entries(folder)]
    # A rank that failed between its vote and its report may have left a note too.
    notes = [n for n in names if attempt_of(n) == attempt and n.endswith(".failed")]
    _delete(store, folder, notes)
    sweep(store, folder, spare=lambda one: one == attempt or not is_stale(one, attempt))


def sweep_lost(store: Store, folders: Iterable[str], attempt: str) -> None:
    """Drop what earlier tries of this session left in folders where one is known to have failed.

    For the coordinator, which takes up `attempt` after it has decided on all those before it: what
    no manifest names then, none ever will.
    """
    for folder in folders:
        sweep(store, folder, spare=lambda one: not is_earlier(one, attempt))
        store.delete_folder(folder)


def _delete(store: Store, folder: str, names: Iterable[str]) -> None:
    for name in names:
        try:
            store.delete(f"{folder}/{name}")
        except OSError as error:
            logger.warning("left %s/%s behind: %s", folder, name, error)
