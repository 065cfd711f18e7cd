"""Documents from outside: bytes in, a Manifest or a Part out, or a refusal that says why.

Every byte here may have been damaged or planted, so nothing is believed before it was checked.
Knows the schema. Knows nothing of stores; what holds between documents is `whole.check_parts`.
"""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch_ckpt.errors import FormatError, IntegrityError
from torch_ckpt.manifest.digest import Bytes, canonical_json, sha256_hex
from torch_ckpt.manifest.fields import (
    MAX_NUMBER,
    array,
    mapping,
    matched,
    number,
    refuse,
    short,
    text,
    texts,
)
from torch_ckpt.manifest.index import check_cuts, parse_bases, parse_blocks, parse_tensors
from torch_ckpt.manifest.layout import check_name, is_ours
from torch_ckpt.manifest.schema import (
    ENCODED_FORMAT,
    FORMAT,
    Borrowed,
    Json,
    Manifest,
    Part,
    StoredFile,
    Summary,
    Vote,
)

READABLE = {"manifest": (FORMAT,), "part": (FORMAT, ENCODED_FORMAT), "index": (FORMAT,)}
"""The format versions that this version reads, by kind of document."""

MAX_DEPTH = 256
"""Arrays and objects inside each other; deeper ones could exhaust a reader's stack."""

MAX_WORLD_SIZE = 1 << 20

_ATTEMPT = re.compile(r"[0-9a-f]{8}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FACTS = frozenset(
    ["step", "attempt", "run", "created", "world_size", "bytes", "parent", "mesh", "bases"]
) | {"tags", "metrics", "framework"}
_MANIFEST_FIELDS = _FACTS | {"format", "kind", "parts", "sha256"}
_INDEX_FIELDS = frozenset(["format", "kind", "generations", "sha256"])
_SUMMARY_FIELDS = _FACTS | {"folder", "parts_bytes", "manifest_sha256"}
_VOTE_FIELDS = frozenset(
    ["format", "kind", "step", "attempt", "run", "rank", "world_size", "files"]
)
_PART_FIELDS = _VOTE_FIELDS | {"blocks", "tensors", "aliases", "tree", "per_rank"}
_ENCODED_VOTE_FIELDS = frozenset(["borrowed", "lossy"])
_ENCODED_PART_FIELDS = frozenset(["borrowed", "lossy", "bases"])


def parse_manifest(data: bytes, *, file: str) -> Manifest:
    """The manifest in `data`; `file` is where it came from, for messages.

    Raises:
        FormatError: it is not a manifest that this version reads, or it contradicts itself.
        IntegrityError: its bytes are not the ones that were written.
    """
    doc = _document(data, kind="manifest", fields=_MANIFEST_FIELDS, file=file)
    _check_own_digest(doc, data, file=file)
    world_size = number(doc, "world_size", file, low=1, high=MAX_WORLD_SIZE)
    return _manifest(doc, _part_files(doc, world_size, file), file)


def parse_index(data: bytes, *, file: str) -> list[Summary]:
    """The summaries in an index; `file` is where it came from, for messages.

    Raises:
        FormatError: it is not an index that this version reads.
        IntegrityError: its bytes are not the ones that were written.
    """
    with _uncollected():
        doc = _document(data, kind="index", fields=_INDEX_FIELDS, file=file)
        _check_own_digest(doc, data, file=file)
        return [_summary(item, file) for item in array(doc, "generations", file)]


def _summary(item: Any, file: str) -> Summary:
    if type(item) is not dict or item.keys() != _SUMMARY_FIELDS:
        refuse(file, f"generations holds {short(item)}, which is no summary")
    return Summary(
        folder=check_name(text(item, "folder", file), file=file),
        manifest=_manifest(item, (), file),
        parts_bytes=number(item, "parts_bytes", file),
        sha256=matched(item, "manifest_sha256", _SHA256, file),
    )


def _manifest(doc: Mapping[str, Any], parts: tuple[StoredFile, ...], file: str) -> Manifest:
    return Manifest(
        step=number(doc, "step", file),
        attempt=matched(doc, "attempt", _ATTEMPT, file),
        run=text(doc, "run", file),
        created=text(doc, "created", file),
        world_size=number(doc, "world_size", file, low=1, high=MAX_WORLD_SIZE),
        parts=parts,
        bytes=number(doc, "bytes", file),
        parent=_check_depth(_parent(doc, file), file),
        mesh=_check_depth(doc["mesh"], file),
        bases=_bases(doc, file),
        tags=texts(doc, "tags", file),
        metrics=_metrics(doc, file),
        framework=texts(doc, "framework", file),
    )


def parse_vote(data: bytes, *, file: str) -> Vote:
    """The first fields of a part, which a caller has made a document of their own.

    Raises:
        FormatError: they are not those of a part that this version reads.
    """
    more = _ENCODED_VOTE_FIELDS
    return _vote(_document(data, kind="part", fields=_VOTE_FIELDS, more=more, file=file), file)


def parse_part(data: Bytes, *, file: str) -> Part:
    """The part in `data`, whose digest the caller has checked; `file` is for messages.

    Raises:
        FormatError: it is not a part that this version reads, or it contradicts itself.
    """
    with _uncollected():
        return _parse_part(data, file)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Spare the garbage collector a million new objects that all stay; it takes half the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _parse_part(data: Bytes, file: str) -> Part:
    doc = _document(data, kind="part", fields=_PART_FIELDS, more=_ENCODED_PART_FIELDS, file=file)
    vote = _vote(doc, file)
    bases = None
    if doc["format"] == ENCODED_FORMAT:
        bases = parse_bases(array(doc, "bases", file), vote, file=file)
    blocks = parse_blocks(array(doc, "blocks", file), vote, bases, file=file)
    tensors = parse_tensors(array(doc, "tensors", file), sum(blocks.raw_bytes), file=file)
    check_cuts(blocks, tensors, file=file)
    aliases = texts(doc, "aliases", file)
    names = set(tensors.heads.names) if aliases else ()
    for alias, target in aliases.items():
        if alias in names or target in aliases:
            refuse(file, f"alias {alias!r} is a tensor itself or leads to another alias")
        # With several ranks the target may be in another part: `check_parts` looks there.
        if vote.world_size == 1 and target not in names:
            refuse(file, f"alias {alias!r} leads to {target!r}, which is no tensor")
    return Part(
        step=vote.step,
        attempt=vote.attempt,
        run=vote.run,
        rank=vote.rank,
        world_size=vote.world_size,
        files=vote.files,
        blocks=blocks,
        tensors=tensors,
        aliases=aliases,
        tree=_check_depth(doc["tree"], file),
        per_rank=_check_depth(mapping(doc, "per_rank", file), file),
        borrowed=vote.borrowed,
        lossy=vote.lossy,
        bases=bases or (),
    )


def _vote(doc: dict[str, Any], file: str) -> Vote:
    world_size = number(doc, "world_size", file, low=1, high=MAX_WORLD_SIZE)
    return Vote(
        step=number(doc, "step", file),
        attempt=matched(doc, "attempt", _ATTEMPT, file),
        run=text(doc, "run", file),
        rank=number(doc, "rank", file, high=world_size),
        world_size=world_size,
        files=_shards(doc, file),
        borrowed=_borrowed(doc, file) if doc["format"] == ENCODED_FORMAT else (),
        lossy=_lossy(doc, file) if doc["format"] == ENCODED_FORMAT else (),
    )


def _document(
    data: Bytes,
    *,
    kind: str,
    fields: frozenset[str],
    more: frozenset[str] = frozenset(),
    file: str,
) -> dict[str, Any]:
    """The object in `data`; one of the encoded format has `more` fields."""
    doc = _load(data, file)
    if type(doc) is not dict:
        refuse(file, f"is not a {kind}: a JSON object was expected")
    if doc.get("kind") != kind:
        refuse(file, f"is not a {kind}: its kind is {short(doc.get('kind'))}")
    version = doc.get("format")
    if version not in READABLE[kind]:
        refuse(
            file,
            f"has format {short(version)}; this version reads {', '.join(READABLE[kind])}. "
            "Read it with the version of torch-ckpt that wrote it, or a later one",
        )
    fields = fields | more if version == ENCODED_FORMAT else fields
    if doc.keys() != fields:
        # A field this version does not know could change what the others mean.
        odd = ", ".join(sorted(map(short, doc.keys() ^ fields))[:5])
        refuse(file, f"lacks these fields or must not have them: {odd}")
    return doc


def _load(data: Bytes, file: str) -> Json:
    try:
        text = str(data, "ascii")
        doc = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        refuse(file, f"is nested more than {MAX_DEPTH} deep")
    except ValueError as error:
        raise FormatError(file=file, reason=f"is not JSON: {error}") from error
    return doc


def _check_depth(value: Json, file: str) -> Json:
    """Return `value` if readers can walk it; the rest of a document has a fixed shape."""
    level, depth = [value], 0
    while level := [
        child
        for node in level
        if type(node) is dict or type(node) is list
        for child in (node.values() if type(node) is dict else node)
    ]:
        depth += 1
        if depth > MAX_DEPTH:
            refuse(file, f"is nested more than {MAX_DEPTH} deep")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


def _check_own_digest(doc: dict[str, Any], data: bytes, *, file: str) -> None:
    body = {key: value for key, value in doc.items() if key != "sha256"}
    found = sha256_hex(canonical_json(body))
    # Every byte counts: other spellings of the same values were not written by a commit.
    canonical = canonical_json(doc) == data
    if doc["sha256"] != found or not canonical:
        raise IntegrityError(
            file=file,
            offset=0,
            reason=f"its SHA-256 is {found[:12]} and it says {short(doc['sha256'])}"
            if doc["sha256"] != found
            else "it is not in canonical form, so it was changed after it was written",
        )


def _metrics(doc: Mapping[str, Any], file: str) -> dict[str, float]:
    metrics = {}
    for name, value in mapping(doc, "metrics", file).items():
        if type(value) is str and value in _FLOATS:
            metrics[name] = _FLOATS[value]
        elif type(value) is float or (type(value) is int and abs(value) < MAX_NUMBER):
            metrics[name] = float(value)
        else:
            refuse(file, f"metrics[{short(name)}] is {short(value)}, not a number")
    return metrics


def _parent(doc: Mapping[str, Any], file: str) -> dict[str, Any] | None:
    if doc["parent"] is None:
        return None
    parent = mapping(doc, "parent", file)
    if not parent.keys() >= {"step", "attempt"}:
        refuse(file, "parent lacks step or attempt")
    number(parent, "step", file)
    matched(parent, "attempt", _ATTEMPT, file)
    return parent


def _bases(doc: Mapping[str, Any], file: str) -> tuple[int, ...]:
    bases = array(doc, "bases", file)
    for base in bases:
        if number({"bases": base}, "bases", file) >= doc["step"]:
            refuse(file, f"builds on step {base}, which is not before its own step {doc['step']}")
    return tuple(bases)


def _objects(
    doc: Mapping[str, Any],
    key: str,
    fields: frozenset[str],
    file: str,
    build: Callable[[dict[str, Any], str], StoredFile],
) -> tuple[StoredFile, ...]:
    built = []
    for item in array(doc, key, file):
        if type(item) is not dict or item.keys() != fields:
            refuse(file, f"{key} holds {short(item)}, not an object of {', '.join(fields)}")
        built.append(build(item, file))
    if len({entry.name for entry in built}) != len(built):
        refuse(file, f"{key} names a file twice")
    return tuple(built)


def _file_name(item: Mapping[str, Any], file: str, endings: tuple[str, ...]) -> str:
    name = check_name(text(item, "name", file), file=file)
    # Deleting a generation removes what it names, so it may name nothing but files of saves.
    if len(name) > 255 or not is_ours(name) or not name.endswith(endings):
        refuse(file, f"names {short(name)}, which is not a file that a save writes here")
    return name


def _part_file(item: dict[str, Any], file: str) -> StoredFile:
    return StoredFile(
        name=_file_name(item, file, (".json",)),
        bytes=number(item, "bytes", file),
        sha256=matched(item, "sha256", _SHA256, file),
    )


def _shard(item: dict[str, Any], file: str) -> StoredFile:
    return StoredFile(
        name=_file_name(item, file, (".safetensors", ".blocks")),
        bytes=number(item, "bytes", file),
    )


def _borrowed(doc: Mapping[str, Any], file: str) -> tuple[Borrowed, ...]:
    fields = frozenset({"step", "attempt", "folder", "name", "bytes"})
    borrowed = []
    for item in array(doc, "borrowed", file):
        if type(item) is not dict or item.keys() != fields:
            refuse(file, f"borrowed holds {short(item)}, not an object of {', '.join(fields)}")
        if (step := number(item, "step", file)) >= doc["step"]:  # so there is no circle
            refuse(file, f"borrows from step {step}, which is not before its own {doc['step']}")
        borrowed.append(
            Borrowed(
                step=step,
                attempt=matched(item, "attempt", _ATTEMPT, file),
                folder=check_name(text(item, "folder", file), file=file),
                name=_file_name(item, file, (".safetensors", ".blocks")),
                bytes=number(item, "bytes", file),
            )
        )
    if len({(one.folder, one.name) for one in borrowed}) != len(borrowed):
        refuse(file, "borrowed names a file twice")
    return tuple(borrowed)


def _lossy(doc: Mapping[str, Any], file: str) -> tuple[str, ...]:
    lines = array(doc, "lossy", file)
    if not all(type(line) is str for line in lines):
        refuse(file, f"lossy is {short(lines)}, not an array of strings")
    return tuple(lines)


def _part_files(doc: Mapping[str, Any], world_size: int, file: str) -> tuple[StoredFile, ...]:
    parts = _objects(doc, "parts", frozenset({"name", "bytes", "sha256"}), file, _part_file)
    if len(parts) != world_size:
        refuse(file, f"names {len(parts)} parts for a world size of {world_size}")
    return parts


def _shards(doc: Mapping[str, Any], file: str) -> tuple[StoredFile, ...]:
    return _objects(doc, "files", frozenset({"name", "bytes"}), file, _shard)
