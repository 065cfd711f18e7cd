"""Which run an archive belongs to: the first that comes keeps it.

Knows the note that says so. Knows nothing of promotions.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from torch_ckpt.errors import ArchiveTaken, StorageError, UnexpectedFile
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.manifest.layout import NOTE_LIMIT_BYTES, RUN
from torch_ckpt.storage.store import Store


def claim(archive: Store, run: str, *, looks: bool) -> None:
    """Make the archive this run's own; who `looks` also goes by what is there without a note.

    Raises:
        ArchiveTaken: it is another run's.
        StorageError: nobody can tell whose it is, or storage did not answer.
    """
    archive.make_folder("")
    owner = _owner_of(archive)
    if owner is None and looks:
        owner = next((r for r in _runs_in(archive) if r != run), None)
    if owner is None:
        is_new = archive.put_new(RUN, _document_of(run))
        try:
            owner = _owner_of(archive)  # also ours, which a bad way may have changed
        except StorageError:
            owner = None
        if is_new and owner != run:
            archive.delete(RUN)
            raise StorageError(f"{archive.url}/{RUN} did not arrive as it was sent")
    if owner not in (None, run):
        raise ArchiveTaken(archive=archive.url, owner=str(owner), run=run)


def _document_of(run: str) -> bytes:
    """What `RUN.json` says."""
    return json.dumps({"run": run}).encode("ascii")


def _runs_in(archive: Store) -> set[str]:
    """The runs whose generations an archive without a note has: it was filled by other means."""
    return {one.manifest.run for one in Catalog(archive).committed()}


def _owner_of(archive: Store) -> str | None:
    """The run that an archive says it belongs to; None if it does not say.

    Raises:
        StorageError: it says so in a way that nobody understands, or storage did not answer.
    """
    found: Any = None
    with contextlib.suppress(UnexpectedFile, ValueError):
        try:
            found = json.loads(archive.get(RUN, limit=NOTE_LIMIT_BYTES))
        except FileNotFoundError:
            return None
    run = found.get("run") if isinstance(found, dict) else None
    if isinstance(run, str):
        return run
    raise StorageError(
        f"{archive.url}/{RUN} does not name the run whose archive this is: remove it if nothing "
        "else is there, or give this run a prefix of its own"
    )
