"""Published documents: write one atomically, read one back with every check.

Order is safety here: parts before the manifest that names them, `LATEST` after it. Knows stores
and the schema. Knows nothing of tensors in memory, of other generations or of retention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from torch_ckpt.errors import FormatError, IntegrityError, StorageError
from torch_ckpt.manifest.digest import sha256_hex
from torch_ckpt.manifest.layout import LATEST, MANIFEST, part_name
from torch_ckpt.manifest.parse import parse_manifest, parse_part
from torch_ckpt.manifest.schema import Manifest, Part, StoredFile, Vote
from torch_ckpt.manifest.vote import vote_in
from torch_ckpt.manifest.whole import Whole, check_own, check_parts
from torch_ckpt.storage.store import Store

_Document = TypeVar("_Document")

MANIFEST_LIMIT_BYTES = 64 << 20
"""A manifest is O(ranks); a longer file is not one."""

PART_LIMIT_BYTES = 1 << 30
"""A part is O(tensors); a longer file is not one."""

_AT_ONCE = 16
"""Documents on their way from afar, each of which waits for its answer most of the time."""


def publish_part(store: Store, folder: str, part: Part) -> StoredFile:
    """Write one rank's part, which is its vote, and return what a manifest says of it.

    Raises:
        FormatError: a reader would refuse this part, so it is not written.
    """
    name = part_name(part.rank, part.attempt)
    data = part.dump()
    _check_size(store, folder, name, data, PART_LIMIT_BYTES)
    # Now, rather than when it is needed: the coordinator looks at no tensor of other ranks.
    check_own(parse_part(data, file=_url(store, folder, name)), _url(store, folder, name))
    put_document(store, f"{folder}/{name}", data)
    return StoredFile(name=name, bytes=len(data), sha256=sha256_hex(data))


def collect_vote(store: Store, folder: str, name: str) -> tuple[StoredFile, Vote] | None:
    """The vote in a part, and what the manifest to come says of that part.

    None if the part is not there or not whole: a store that cannot publish atomically shows it
    before its end has arrived. Takes memory for one part, and no time for its tensors.

    Raises:
        FormatError: it is whole, and not a part that this version writes.
    """
    try:
        data = store.get(f"{folder}/{name}", limit=PART_LIMIT_BYTES)
    except FileNotFoundError:
        return None
    vote = vote_in(data, file=_url(store, folder, name))
    if vote is None:
        return None
    return StoredFile(name=name, bytes=len(data), sha256=sha256_hex(data)), vote


def publish_manifest(store: Store, folder: str, manifest: Manifest) -> None:
    """Commit: from the moment this returns, and not before, the generation exists.

    Raises:
        FormatError: a reader would refuse this manifest, so it is not written.
    """
    data = manifest.dump()
    _check_size(store, folder, MANIFEST, data, MANIFEST_LIMIT_BYTES)
    parse_manifest(data, file=_url(store, folder, MANIFEST))
    put_document(store, f"{folder}/{MANIFEST}", data)


def put_document(store: Store, name: str, data: bytes) -> None:
    """Write a document, and see that it arrived: not every server checks what it is sent.

    Raises:
        StorageError: another one is there, also after a second try.
    """
    for _ in range(2):
        store.put(name, data)
        if store.capabilities.files or _arrived(store, name) == data:
            return
    raise StorageError(
        f"{store.url}/{name} is not what was sent, twice: something between here and there "
        "changes bytes, or another process writes this name"
    )


def _arrived(store: Store, name: str) -> bytes | None:
    try:
        return store.get(name, limit=PART_LIMIT_BYTES)
    except FileNotFoundError:
        return None


def write_latest(store: Store, folder: str) -> None:
    """Name the newest generation for people and scripts; no reader here believes it."""
    store.put(LATEST, f"{folder}\n".encode(errors="surrogateescape"))


def read_manifest(store: Store, folder: str) -> Manifest:
    """The manifest of a generation's folder.

    Raises:
        FileNotFoundError: there is none, so there is no generation.
        FormatError: it is not a manifest that this version reads.
        IntegrityError: its bytes are not the ones that were written.
    """

    def read() -> Manifest:
        data = store.get(f"{folder}/{MANIFEST}", limit=MANIFEST_LIMIT_BYTES)
        return parse_manifest(data, file=_url(store, folder, MANIFEST))

    return _insist(store, read)


def read_part(store: Store, folder: str, stored: StoredFile) -> Part:
    """The part that a manifest names, after its length and digest were checked.

    Raises:
        FileNotFoundError: it is not there.
        IntegrityError: it is not the document that the manifest names.
        FormatError: it is not a part that this version reads.
    """
    data = read_part_bytes(store, folder, stored)
    return parse_part(data, file=_url(store, folder, stored.name))


def read_part_bytes(store: Store, folder: str, stored: StoredFile) -> bytes:
    """The bytes of the part that a manifest names, after their length and digest were checked.

    Raises:
        FileNotFoundError: it is not there.
        IntegrityError: it is not the document that the manifest names.
    """
    return _insist(store, lambda: _checked(store, folder, stored))


def _checked(store: Store, folder: str, stored: StoredFile) -> bytes:
    data = store.get(f"{folder}/{stored.name}", limit=PART_LIMIT_BYTES)
    url = _url(store, folder, stored.name)
    if len(data) != stored.bytes:
        reason = f"it has {len(data)} bytes, the manifest says {stored.bytes}"
        raise IntegrityError(file=url, offset=min(len(data), stored.bytes), reason=reason)
    found = sha256_hex(data)
    if found != stored.sha256:
        reason = f"its SHA-256 is {found[:12]}, the manifest says {stored.sha256[:12]}"
        raise IntegrityError(file=url, offset=0, reason=reason)
    return data


def _insist(store: Store, read: Callable[[], _Document]) -> _Document:
    """What `read` brings; from afar it is read once more before it counts as damaged."""
    try:
        return read()
    except (FormatError, IntegrityError):
        if store.capabilities.files:
            raise
        return read()


def read_parts(store: Store, folder: str, manifest: Manifest) -> list[Part]:
    """All parts of a generation in rank order, checked against the manifest and each other."""
    return read_whole(store, folder, manifest).parts


def read_whole(store: Store, folder: str, manifest: Manifest) -> Whole:
    """The same with where everything lies in them."""
    return whole_of(store, folder, manifest, list(parts_of(store, folder, manifest.parts)))


def parts_of(store: Store, folder: str, parts: Sequence[StoredFile]) -> Iterator[Part]:
    """As `read_part`, of several parts, a few at a time where storage lets one wait."""
    for stored, data in zip(parts, _parts_bytes(store, folder, parts), strict=True):
        yield parse_part(data, file=_url(store, folder, stored.name))


def whole_of(store: Store, folder: str, manifest: Manifest, parts: Sequence[Part]) -> Whole:
    """As `read_whole`, of parts that came another way than from storage."""
    return check_parts(manifest, parts, _url(store, folder, MANIFEST))


def _parts_bytes(store: Store, folder: str, parts: Sequence[StoredFile]) -> Iterator[bytes]:
    if store.capabilities.files or len(parts) < 2:
        yield from (read_part_bytes(store, folder, stored) for stored in parts)
        return
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ckpt-parts") as pool:
        try:
            yield from pool.map(partial(read_part_bytes, store, folder), parts)
        finally:
            pool.shutdown(cancel_futures=True)


def update_tags(
    store: Store, folder: str, *, add: Mapping[str, str], drop: Iterable[str] = ()
) -> Manifest:
    """Give a generation tags with their reasons, and take others away; return what it says now.

    The manifest is replaced as a whole, so that no reader sees it missing. Of two processes that
    do this at once, one wins: only the coordinator of a run does.
    """
    manifest = read_manifest(store, folder)
    dropped = set(drop)
    kept = {tag: why for tag, why in manifest.tags.items() if tag not in dropped}
    updated = manifest.with_tags({**kept, **add})
    if updated.tags != manifest.tags:
        publish_manifest(store, folder, updated)
    return updated


def _url(store: Store, folder: str, name: str) -> str:
    return f"{store.url}/{folder}/{name}"


def _check_size(store: Store, folder: str, name: str, data: bytes, limit: int) -> None:
    if len(data) > limit:
        reason = f"would have {len(data)} bytes, more than the {limit} that readers accept"
        raise FormatError(file=_url(store, folder, name), reason=reason)
