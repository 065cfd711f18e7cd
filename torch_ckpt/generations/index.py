"""The index of a remote root: a convenience, so that many generations are listed in few requests.

It is never trusted for what is there (the listing of the root is), nor by anyone who acts on a
generation (they read its manifest). A root without one, or with a stale one, is only slower to
list. Knows stores and documents. Knows nothing of which generations are worth keeping.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from torch_ckpt.errors import FormatError, IntegrityError, UnexpectedFile
from torch_ckpt.manifest.layout import INDEX
from torch_ckpt.manifest.parse import parse_index
from torch_ckpt.manifest.schema import Summary, dump_index
from torch_ckpt.storage.store import Store

if TYPE_CHECKING:
    from torch_ckpt.generations.catalog import Catalog, Generation

logger = logging.getLogger(__name__)

INDEX_LIMIT_BYTES = 64 << 20
"""About 100,000 generations; a longer file is not an index."""

FRESH = 32
"""The newest generations are always read themselves: runs start from these and prune counts them,
so tags and replacements that the index has not heard of must not matter there."""


def read_index(store: Store) -> dict[str, Summary]:
    """What the index says, by folder; nothing if there is none or it cannot be used.

    Raises:
        StorageError: storage did not answer.
    """
    url = f"{store.url}/{INDEX}"
    try:
        data = store.get(INDEX, limit=INDEX_LIMIT_BYTES)
        return {one.folder: one for one in parse_index(data, file=url)}
    except FileNotFoundError:
        return {}
    except (FormatError, IntegrityError, UnexpectedFile) as error:
        logger.debug("the index is not used: %s", error)
        return {}


def write_index(catalog: Catalog, *, changed: Collection[str] = ()) -> None:
    """Bring the index of a remote root up to date; local roots have none.

    After each promotion, and after whatever changed the manifests in the folders `changed`. Of
    two processes that do this at once, one wins: what the other knew is read by those who list.
    """
    if catalog.store.capabilities.files:
        return
    committed, _ = catalog.scan(reread=changed)
    _put(catalog.store, [_summary(one) for one in committed])


def refresh_index(catalog: Catalog, *, changed: Collection[str] = ()) -> None:
    """`write_index` where there is an index; roots that nobody keeps one in get none."""
    if not catalog.store.capabilities.files and read_index(catalog.store):
        write_index(catalog, changed=changed)


def forget(store: Store, folders: Collection[str]) -> None:
    """Drop folders from the index, so that whoever lists the root asks their manifests.

    Before a manifest is deleted or replaced, since the listing of an object store cannot tell a
    half deleted folder from a generation.
    """
    if store.capabilities.files or not folders:
        return
    known = read_index(store)
    if known.keys() & set(folders):
        _put(store, [one for name, one in known.items() if name not in folders])


def _put(store: Store, summaries: Iterable[Summary]) -> None:
    kept = sorted(summaries, key=lambda one: (-one.manifest.step, one.folder))
    data = dump_index(kept)
    while len(data) > INDEX_LIMIT_BYTES:  # the oldest are read one by one then
        kept = kept[: len(kept) // 2]
        data = dump_index(kept)
    store.put(INDEX, data)


def _summary(one: Generation) -> Summary:
    known = one.indexed
    return Summary(
        folder=one.folder,
        manifest=one.manifest.without_parts(),
        parts_bytes=one.parts_bytes,
        sha256=one.manifest.sha256 if known is None else known.sha256,
    )
