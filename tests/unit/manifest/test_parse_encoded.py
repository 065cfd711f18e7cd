"""Parts of the encoded format: they come back as they were written, or are refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import samples
from torch_ckpt.errors import CkptError, FormatError
from torch_ckpt.manifest.entries import BLOCK_BYTES, Block, Chunk, TensorEntry
from torch_ckpt.manifest.index import MAX_CHAIN
from torch_ckpt.manifest.parse import parse_manifest, parse_part
from torch_ckpt.manifest.schema import ENCODED_FORMAT, Borrowed, Part, StoredFile
from torch_ckpt.manifest.vote import vote_in
from torch_ckpt.manifest.whole import check_parts

RAW = 1024


def block(file: int, offset: int, stored: int, codec: str, base: int | None = None) -> Block:
    return Block(
        file=file,
        offset=offset,
        bytes=stored,
        raw_bytes=RAW,
        sha256=f"{offset:064x}",
        xxh3=f"{offset:016x}",
        codec=codec,
        base=base,
    )


def lender(step: int) -> Borrowed:
    attempt = f"{step:08x}"
    return Borrowed(
        step=step,
        attempt=attempt,
        folder=f"step-{step:010d}",
        name=f"rank-00000.{attempt}.blocks",
        bytes=5000,
    )


PART = Part(
    step=9,
    attempt="0123abcd",
    run="run-a",
    rank=0,
    world_size=1,
    files=(StoredFile(name="rank-00000.0123abcd.blocks", bytes=700),),
    borrowed=(lender(4), lender(8)),
    blocks=(
        block(0, 0, 300, "zstd"),
        block(0, 300, 400, "delta", base=1),
        block(0, 0, 300, "zstd"),  # the same as the first, and stored once
        block(1, 100, 1024, "raw"),
        block(2, 0, 200, "zstd"),
    ),
    bases=(block(1, 2000, 100, "zstd"), block(2, 200, 90, "delta", base=0)),
    lossy=("fp8 for *exp_avg",),
    tensors=(
        TensorEntry(
            name="w",
            dtype="float32",
            shape=(5 * RAW // 4,),
            chunks=(Chunk(offsets=(0,), shape=(5 * RAW // 4,), start=0),),
        ),
    ),
    tree={"w": {"$tensor": "w"}},
)

Edit = Callable[[dict[str, Any]], object]


def part_with(edit: Edit) -> bytes:
    doc = json.loads(PART.dump())
    edit(doc)
    return json.dumps(doc).encode()


def put(*path: Any) -> Edit:
    """Set the value at a path of keys, the last of which is the value."""
    *keys, last, value = path

    def edit(doc: Any) -> None:
        for key in keys:
            doc = doc[key]
        doc[last] = value

    return edit


def twice(key: str, index: int) -> Edit:
    return lambda doc: doc[key].append(doc[key][index])


def a_long_chain(doc: dict[str, Any]) -> None:
    first = doc["bases"][1]
    for number in range(1, MAX_CHAIN + 1):
        doc["bases"].append({**first, "base": number})


def a_base_of_its_own(doc: dict[str, Any]) -> None:
    doc["bases"][0].update(file=0, offset=0)


def a_block_beside(doc: dict[str, Any]) -> None:
    doc["blocks"][2]["offset"] = 1


def a_twin_that_decodes_otherwise(doc: dict[str, Any]) -> None:
    doc["blocks"][2]["raw_bytes"] = RAW // 2
    doc["blocks"][4]["raw_bytes"] = RAW + RAW // 2


def as_the_first_format(doc: dict[str, Any]) -> None:
    for key in ("borrowed", "lossy", "bases"):
        del doc[key]
    doc["format"] = "torch-ckpt/1"
    for one in doc["blocks"]:
        del one["base"]


def test_a_part_comes_back_as_it_was_written() -> None:
    assert json.loads(PART.dump())["format"] == ENCODED_FORMAT
    assert parse_part(PART.dump(), file="part") == PART


def test_its_vote_names_what_it_borrows() -> None:
    vote = vote_in(PART.dump(), file="part")
    assert vote is not None
    assert (vote.borrowed, vote.files, vote.lossy) == (PART.borrowed, PART.files, PART.lossy)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (put("borrowed", 0, "name", "../rank-00000.00000004.blocks"), "not a plain file name"),
        (put("borrowed", 0, "name", "manifest.json"), "not a file that a save writes"),
        (put("borrowed", 0, "name", "rank-00000.00000004.json"), "not a file that a save writes"),
        (put("borrowed", 0, "name", "/etc/passwd"), "not a plain file name"),
        (put("borrowed", 0, "folder", ".."), "not a plain file name"),
        (put("borrowed", 0, "folder", "../run-b"), "not a plain file name"),
        (put("borrowed", 0, "folder", "/step-0000000004"), "not a plain file name"),
        (put("borrowed", 0, "folder", "a\\b"), "not a plain file name"),
        (put("borrowed", 0, "folder", ""), "not a plain file name"),
        (put("borrowed", 0, "folder", "s3://bucket"), "not a plain file name"),
        (put("borrowed", 0, "step", 9), "borrows from step 9, which is not before its own 9"),
        (put("borrowed", 0, "step", 10**18), "is not before its own 9"),
        (put("borrowed", 0, "step", -1), "step is -1"),
        (put("borrowed", 0, "step", True), "step is True"),
        (put("borrowed", 0, "attempt", "XYZ"), "attempt"),
        (put("borrowed", 0, "bytes", -5), "bytes is -5"),
        (put("borrowed", 0, "surprise", 1), "borrowed holds"),
        (put("borrowed", {}), "borrowed is {}, not an array"),
        (lambda doc: doc["borrowed"][0].pop("folder"), "borrowed holds"),
        (twice("borrowed", 0), "borrowed names a file twice"),
        (lambda doc: doc.pop("borrowed"), "'borrowed'"),
        (lambda doc: doc.pop("bases"), "'bases'"),
        (put("lossy", [1]), "lossy is [1], not an array of strings"),
        (put("step", 0), "is not before its own 0"),
        (put("bases", 1, "base", 1), "base 1: base 1 is not one of the 1 that come before it"),
        (put("bases", 1, "base", 2), "base 1: base 2 is not one of the 1"),
        (put("bases", 1, "base", -1), "base 1: base -1"),
        (put("bases", 1, "base", True), "base 1: base True"),
        (a_base_of_its_own, "base 0: lies in the part's own file"),
        (put("bases", 0, "file", 3), "base 0: file 3 is not one of the part's 3"),
        (put("bases", 0, "bytes", 6000), "base 0: 6000 bytes at 2000 do not lie in a file"),
        (put("bases", 0, "raw_bytes", 2 * RAW), "base 1: its base has 2048 raw bytes"),
        (put("bases", 0, "raw_bytes", BLOCK_BYTES + 1), "base 0: raw_bytes is"),
        (put("bases", 1, "raw_bytes", 8), "base 1: its base has 1024 raw bytes instead of 8"),
        (a_long_chain, f"is the end of a chain of more than {MAX_CHAIN}"),
        (put("blocks", 0, "codec", "gzip"), "block 0: codec 'gzip' is not one of"),
        (put("blocks", 0, "codec", ["zstd"]), "block 0: codec"),
        (put("blocks", 0, "base", 0), "block 0: codec 'zstd' comes with base 0"),
        (put("blocks", 1, "base", None), "block 1: codec 'delta' comes with base None"),
        (put("blocks", 1, "base", 2), "block 1: base 2 is not one of the 2"),
        (lambda doc: doc["blocks"][1].pop("base"), "block 1: has fields"),
        (put("blocks", 3, "base", 0), "block 3: codec 'raw' comes with base 0"),
        (put("blocks", 0, "raw_bytes", 1 << 40), "block 0: raw_bytes is 1099511627776"),
        (put("blocks", 0, "raw_bytes", 0), "block 0: raw_bytes is 0"),
        (put("blocks", 3, "raw_bytes", 2 * RAW), "block 3: stores 1024 bytes and says"),
        (put("blocks", 0, "raw_bytes", 2 * RAW), "overlaps another block"),
        (put("blocks", 4, "raw_bytes", 2 * RAW), "chunks fill 5120 bytes, blocks 6144"),
        (put("blocks", 4, "offset", 4900), "block 4: 200 bytes at 4900 do not lie in a file"),
        (a_block_beside, "the block at byte 1: overlaps another block"),
        (a_twin_that_decodes_otherwise, "overlaps another block"),
        (put("blocks", 2, "codec", "fp8"), "overlaps another block"),
        (as_the_first_format, "is not one of"),
    ],
)
def test_a_part_that_contradicts_itself_is_refused_in_one_line(edit: Edit, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_part(part_with(edit), file="the-part.json")
    text = str(caught.value)
    assert says in text, text
    assert "the-part.json" in text
    assert "\n" not in text
    assert len(text) < 600


def test_the_first_format_knows_no_twins() -> None:
    raw = replace(PART.blocks[3], file=0, offset=0)
    part = replace(
        PART,
        files=(StoredFile(name="rank-00000.0123abcd.safetensors", bytes=RAW),),
        borrowed=(),
        bases=(),
        lossy=(),
        blocks=(raw,) * 5,
    )
    assert not part.encoded
    with pytest.raises(FormatError, match="overlaps another block"):
        parse_part(part.dump(), file="part")
    laid = replace(part, files=(StoredFile(name="rank-00000.0123abcd.blocks", bytes=RAW),))
    assert parse_part(laid.dump(), file="part") == laid


@pytest.mark.parametrize("base", [7, 8, 1 << 61])
def test_a_manifest_that_builds_on_itself_or_the_future_is_refused(base: int) -> None:
    data = samples.manifest(step=7, bases=(3, base)).dump()
    with pytest.raises(FormatError, match=f"builds on step {base}, which is not before its own"):
        parse_manifest(data, file="manifest")


@pytest.mark.parametrize(
    ("bases", "attempt", "says"),
    [
        ((4,), "00000008", "rank 0 borrows from step 8, which is not in bases"),
        ((), "00000008", "rank 0 borrows from step 4, which is not in bases"),
        ((4, 8), "0123abcd", "borrows from this very generation"),
    ],
)
def test_a_manifest_that_does_not_pin_what_parts_borrow_is_refused(
    bases: tuple[int, ...], attempt: str, says: str
) -> None:
    manifest = samples.manifest(step=9, bases=bases, bytes=700)
    part = replace(PART, borrowed=(PART.borrowed[0], replace(PART.borrowed[1], attempt=attempt)))
    with pytest.raises(FormatError, match=says):
        check_parts(manifest, [part], "manifest")
    check_parts(replace(manifest, bases=(4, 8)), [PART], "manifest")


PATHS = [
    *[("borrowed", i, key) for i in (0, 1) for key in ("step", "attempt", "folder", "name")],
    *[("blocks", i, key) for i in (0, 1, 2) for key in ("file", "offset", "bytes", "raw_bytes")],
    *[("blocks", i, key) for i in (1, 4) for key in ("codec", "base", "sha256")],
    *[("bases", i, key) for i in (0, 1) for key in ("file", "base", "codec", "raw_bytes")],
    ("bases",),
    ("borrowed",),
    ("lossy",),
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(path=st.sampled_from(PATHS), value=VALUES)
def test_any_field_may_hold_anything(path: tuple[Any, ...], value: Any) -> None:
    doc = copy.deepcopy(json.loads(PART.dump()))
    put(*path, value)(doc)
    try:
        found = parse_part(json.dumps(doc).encode(), file="part")
    except CkptError:
        return
    for one in (*found.blocks, *found.bases):  # what is not refused can be read
        assert found.file_name(one, "folder").count("/") == 1
        assert one.base is None or found.bases[one.base].raw_bytes == one.raw_bytes


def test_a_vote_may_name_thousands_of_rules_by_which_something_is_lost() -> None:
    rules = tuple(f"lossy-delta 0.05 for model.layers.{i}.self_attn.weight" for i in range(2000))
    vote = vote_in(replace(PART, lossy=rules).dump(), file="part")
    assert vote is not None
    assert vote.lossy == rules
