"""Documents come back as they were written; anything else is refused by name."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import samples
from torch_ckpt.errors import CkptError, FormatError, IntegrityError
from torch_ckpt.manifest.digest import canonical_json, sha256_hex
from torch_ckpt.manifest.entries import BLOCK_BYTES, Block, Chunk, TensorEntry
from torch_ckpt.manifest.parse import MAX_DEPTH, parse_manifest, parse_part
from torch_ckpt.manifest.schema import Part, StoredFile

PART = samples.image(samples.arrays()).part
MANIFEST = samples.manifest(
    step=7,
    parent={"step": 6, "attempt": "00000000"},
    tags={"permanent": "asked for"},
    metrics={"loss": 0.5, "odd": math.nan, "low": -math.inf},
    framework={"torch": "2"},
    bases=(3, 5),
    mesh={"shape": [2, 2]},
)

Edit = Callable[[dict[str, Any]], object]


def part_with(edit: Edit) -> bytes:
    doc = json.loads(PART.dump())
    edit(doc)
    return json.dumps(doc).encode()


def manifest_with(edit: Edit) -> bytes:
    doc = json.loads(MANIFEST.dump())
    del doc["sha256"]
    edit(doc)
    return canonical_json({**doc, "sha256": sha256_hex(canonical_json(doc))})


def put(*path: Any) -> Edit:
    """Set the value at a path of keys, the last of which is the value."""
    *keys, last, value = path

    def edit(doc: Any) -> None:
        for key in keys:
            doc = doc[key]
        doc[last] = value

    return edit


def test_a_part_comes_back_as_it_was_written() -> None:
    part = replace(PART, aliases={"tied": "model.weight"}, per_rank={"rng": {"$tuple": [1]}})
    assert parse_part(part.dump(), file="part") == part


@pytest.mark.parametrize(("first", "refused"), [(4096, False), (4097, True), (4098, True)])
def test_a_block_that_cuts_an_element_in_two_is_refused(first: int, refused: bool) -> None:
    block = replace(PART.blocks[0], offset=0)
    sizes = (first, 3000 * 4 - first)
    part = replace(
        PART,
        files=(replace(PART.files[0], bytes=3000 * 4),),
        blocks=(
            replace(block, bytes=sizes[0], raw_bytes=sizes[0]),
            replace(block, offset=first, bytes=sizes[1], raw_bytes=sizes[1]),
        ),
        tensors=(
            TensorEntry(
                name="w",
                dtype="float32",
                shape=(3000,),
                chunks=(Chunk(offsets=(0,), shape=(3000,), start=0),),
            ),
        ),
        aliases={},
    )
    if not refused:
        assert parse_part(part.dump(), file="part") == part
        return
    with pytest.raises(FormatError, match="cuts an element in two at byte 409"):
        parse_part(part.dump(), file="part")


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_number_beyond_all_floats_is_refused(number: str) -> None:
    # Python reads it as an infinity, which then has no JSON: nothing could pass it on.
    data = PART.dump()
    assert data.count(b'"tree":{') == 1
    with pytest.raises(FormatError, match=f"is not JSON: {number} is no finite number"):
        parse_part(data.replace(b'"tree":{', b'"tree":{"x":%s,' % number.encode()), file="part")


def test_a_manifest_comes_back_as_it_was_written() -> None:
    found = parse_manifest(MANIFEST.dump(), file="manifest")
    assert math.isnan(found.metrics["odd"])
    assert found.metrics["low"] == -math.inf
    assert replace(found, metrics={}) == replace(MANIFEST, metrics={})
    assert found.dump() == MANIFEST.dump()


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (put("kind", "manifest"), "is not a part"),
        (put("format", "torch-ckpt/99"), "this version reads torch-ckpt/1"),
        (put("format", []), "this version reads"),
        (put("surprise", 1), "'surprise'"),
        (lambda doc: doc.pop("tree"), "'tree'"),
        (put("step", -1), "step is -1"),
        (put("step", True), "step is True"),
        (put("step", 1.0), "step is 1.0"),
        (put("step", 10**30), "step is 1000"),
        (put("attempt", "XYZ"), "attempt"),
        (put("run", 5), "run is 5"),
        (put("rank", 1), "rank is 1"),
        (put("world_size", 0), "world_size is 0"),
        (put("world_size", 10**9), "world_size"),
        (put("files", {}), "files"),
        (put("files", 0, "name", "../../etc/passwd"), "not a plain file name"),
        (put("files", 0, "name", "/etc/passwd"), "not a plain file name"),
        (put("files", 0, "name", "rank-\ud800"), "not a plain file name"),
        (put("files", 0, "name", "manifest.json"), "not a file that a save writes"),
        (put("files", 0, "name", "thesis.txt"), "not a file that a save writes"),
        (put("files", 0, "name", 3), "name is 3"),
        (put("files", 0, "bytes", 1), "do not lie in a file of 1 bytes"),
        (lambda doc: doc["files"].append(doc["files"][0]), "a file twice"),
        (put("blocks", 0, "file", 1), "not one of the part's 1"),
        (put("blocks", 0, "file", -1), "not one of the part's 1"),
        (put("blocks", 0, "offset", 1 << 60), "do not lie in"),
        (put("blocks", 0, "offset", -1), "do not lie in"),
        (put("blocks", 0, "bytes", 0), "do not lie in"),
        (put("blocks", 0, "raw_bytes", BLOCK_BYTES + 1), "raw_bytes is"),
        (put("blocks", 0, "raw_bytes", 1), "says they are 1"),
        (put("blocks", 0, "codec", "zip-bomb"), "codec 'zip-bomb'"),
        (put("blocks", 0, "codec", []), "codec []"),
        (put("blocks", 0, "sha256", "A" * 64), "lower-case hex"),
        (put("blocks", 0, "sha256", None), "block 0"),
        (put("blocks", 0, "xxh3", "a" * 15), "lower-case hex"),
        (put("blocks", 0, "base", 5), "fields"),
        (put("blocks", 0, None), "block 0"),
        (put("blocks", 0, "file", False), "whole numbers"),
        (lambda doc: doc["blocks"].append(doc["blocks"][0]), "overlaps"),
        (lambda doc: doc["blocks"].pop(), "chunks fill"),
        (lambda doc: doc["tensors"].append(doc["tensors"][0]), "was there before"),
        (lambda doc: doc["tensors"].pop(0), "leave a gap"),
        (put("tensors", 0, "name", 5), "name must be a string"),
        (put("tensors", 0, "dtype", "object"), "dtype 'object'"),
        (put("tensors", 0, "dtype", "int8"), "raw space"),
        (put("tensors", 0, "shape", [1 << 40, 1 << 40]), "absurd"),
        (put("tensors", 0, "shape", [-3000]), "whole numbers"),
        (put("tensors", 0, "shape", [3000.0]), "whole numbers"),
        (put("tensors", 0, "shape", [1] * 65), "65 dimensions"),
        (put("tensors", 0, "chunks", 0, "shape", [3000.0]), "whole numbers"),
        (put("tensors", 0, "chunks", 0, "shape", [2999]), "leave a gap"),
        (put("tensors", 0, "chunks", 0, "shape", [3001]), "outside of [3000]"),
        (put("tensors", 0, "chunks", 0, "shape", [3000, 1]), "dimensions"),
        (put("tensors", 0, "chunks", 0, "offsets", [1]), "outside of [3000]"),
        (put("tensors", 0, "chunks", 0, "offsets", [False]), "whole numbers"),
        (put("tensors", 0, "chunks", 0, "offsets", []), "dimensions"),
        (put("tensors", 0, "chunks", 0, "start", 8), "raw space"),
        (put("tensors", 0, "chunks", 0, "start", 1 << 50), "raw space"),
        (put("tensors", 0, "chunks", 0, "start", -8), "starts at byte -8"),
        (put("tensors", 0, "chunks", 0, "start", 4), "no multiple"),
        (put("aliases", {"tied": "nowhere"}), "no tensor"),
        (put("aliases", {"model.weight": "model.mask"}), "is a tensor itself"),
        (put("aliases", {"a": "b", "b": "model.mask"}), "another alias"),
        (put("aliases", {"a": 1}), "not a string"),
        (put("per_rank", []), "per_rank"),
    ],
)
def test_a_part_that_contradicts_itself_is_refused(edit: Edit, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_part(part_with(edit), file="the-part")
    assert says in str(caught.value)
    assert "the-part" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (put("kind", "part"), "is not a manifest"),
        (put("format", "torch-ckpt/2"), "torch-ckpt/2"),
        (put("step", "7"), "step is '7'"),
        (put("bytes", -1), "bytes is -1"),
        (put("created", None), "created is None"),
        (put("world_size", 2), "1 parts for a world size of 2"),
        (put("parts", 0, "name", "a/b.json"), "not a plain file name"),
        (put("parts", 0, "name", "rank-00000.0123abcd.safetensors"), "not a file that"),
        (put("parts", 0, "sha256", "abc"), "sha256"),
        (put("parts", 0, "more", 1), "not an object of"),
        (put("parent", {"step": 1}), "parent lacks"),
        (put("parent", {"step": -1, "attempt": "00000000"}), "step is -1"),
        (put("parent", 3), "parent is 3"),
        (put("bases", [-1]), "bases is -1"),
        (put("tags", {"aside": 1}), "not a string"),
        (put("tags", []), "tags is []"),
        (put("metrics", {"loss": "low"}), "not a number"),
        (put("metrics", {"loss": True}), "not a number"),
        (put("metrics", {"loss": 10**400}), "not a number"),
        (put("framework", {"torch": 2}), "not a string"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(edit: Edit, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_manifest(manifest_with(edit), file="the-manifest")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"NaN",
        b"\xff\xfe{}",
        b'{"kind": "manifest"}',
        b"[" * 100_000,
        b"9" * 5000,
        b'{"a":' * 100_000,
    ],
)
def test_what_is_not_a_document_is_refused(data: bytes) -> None:
    for parse in (parse_manifest, parse_part):
        with pytest.raises(FormatError):
            parse(data, file="x")


def test_objects_nested_too_deep_for_readers_are_refused() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(FormatError, match="nested"):
        parse_part(replace(PART, tree=deep).dump(), file="x")
    assert parse_part(replace(PART, tree=deep[0]).dump(), file="x").tree == deep[0]


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    data = MANIFEST.dump()
    for index in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[index] ^= 1 << bit
            with pytest.raises((FormatError, IntegrityError)):
                parse_manifest(bytes(damaged), file="x")


def test_a_manifest_in_other_words_is_not_the_one_that_was_committed() -> None:
    with pytest.raises(IntegrityError, match="canonical"):
        parse_manifest(json.dumps(json.loads(MANIFEST.dump()), indent=1).encode(), file="x")


def test_a_manifest_with_an_edited_value_fails_its_own_digest() -> None:
    doc = json.loads(MANIFEST.dump())
    doc["step"] += 1
    with pytest.raises(IntegrityError, match="SHA-256"):
        parse_manifest(canonical_json(doc), file="x")


@pytest.mark.slow
def test_a_hundred_thousand_tensors_take_about_a_second() -> None:
    count = 100_000
    part = Part(
        step=1,
        attempt="0" * 8,
        run="r",
        rank=0,
        world_size=1,
        files=(StoredFile(name="rank-00000.00000000.blocks", bytes=64 * count),),
        blocks=tuple(
            Block(
                file=0,
                offset=offset,
                bytes=6_400,
                raw_bytes=6_400,
                sha256="a" * 64,
                xxh3="b" * 16,
            )
            for offset in range(0, 64 * count, 6_400)
        ),
        tensors=tuple(
            TensorEntry(
                name=f"layers.{n}",
                dtype="float32",
                shape=(4, 4),
                chunks=(Chunk(offsets=(0, 0), shape=(4, 4), start=64 * n),),
            )
            for n in range(count)
        ),
    )
    data = part.dump()
    began = time.process_time()
    assert parse_part(data, file="x") == part
    assert time.process_time() - began < 5  # about 0.7 s alone; the machine may be shared


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.lists(st.integers(), max_size=3),
    st.just(1 << 64),
    st.just("\ud800"),
)


def paths(doc: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = doc.items() if type(doc) is dict else enumerate(doc) if type(doc) is list else ()
    return [at, *(path for key, child in items for path in paths(child, (*at, key)))]


PART_PATHS = paths(json.loads(PART.dump()))[1:]
MANIFEST_PATHS = paths(json.loads(MANIFEST.dump()))[1:]


@given(st.sampled_from(PART_PATHS), JUNK)
def test_any_field_of_a_part_may_hold_anything(path: tuple[Any, ...], value: Any) -> None:
    try:
        found = parse_part(part_with(put(*path, value)), file="x")
    except CkptError:
        return
    assert parse_part(found.dump(), file="x") == found


@given(st.sampled_from(MANIFEST_PATHS), JUNK)
def test_any_field_of_a_manifest_may_hold_anything(path: tuple[Any, ...], value: Any) -> None:
    if path == ("sha256",):
        return
    try:
        data = manifest_with(put(*path, value))
        found = parse_manifest(data, file="x")
    except CkptError:
        return
    assert found.dump()


@given(st.data())
def test_any_bytes_of_a_document_may_be_anything(data: st.DataObject) -> None:
    for document, parse in ((PART.dump(), parse_part), (MANIFEST.dump(), parse_manifest)):
        damaged = bytearray(document)
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        try:
            parse(bytes(damaged), file="x")
        except CkptError:
            pass
