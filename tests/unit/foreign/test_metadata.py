"""DCP's pickled metadata is read through stand-ins: what it needs, and nothing else."""

from __future__ import annotations

import io
import os
import pickle
import random
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import metadata as until_2_2
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from tests.unit.foreign.samples import Bomb, edit, save_dcp, training_state
from torch_ckpt import FormatError
from torch_ckpt.foreign.metadata import Contents, read_contents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_dcp(training_state(), tmp_path / "source")


def shown(contents: Contents) -> Any:
    return contents.tensors, contents.objects, list(contents.paths.items())


def refusal(folder: Path) -> str:
    with pytest.raises(FormatError) as caught:
        read_contents(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_metadata_of_this_torch_is_read(folder: Path) -> None:
    contents = read_contents(folder)
    assert contents.tensors["model.0.weight"].dtype == "float32"
    assert contents.tensors["model.0.weight"].shape == (3, 4)
    assert contents.paths["optimizer.param_groups.0.lr"] == ("optimizer", "param_groups", 0, "lr")
    assert "name" in contents.objects


def test_metadata_as_torch_until_2_2_wrote_it_is_read(folder: Path) -> None:
    expected = shown(read_contents(folder))

    def change(metadata: Metadata) -> None:
        del metadata.storage_meta, metadata.version
        for item in metadata.state_dict_metadata.values():
            if hasattr(item, "properties"):
                dtype = item.properties.dtype  # type: ignore[union-attr]
                item.properties = until_2_2.TensorProperties(dtype=dtype)  # type: ignore[union-attr]
        for info in metadata.storage_data.values():
            info.__dict__.pop("transform_descriptors", None)

    edit(folder, change)
    assert (
        b"torch.distributed._shard.sharded_tensor.metadata" in (folder / ".metadata").read_bytes()
    )
    assert shown(read_contents(folder)) == expected


class _EnumsByGetattr(pickle.Pickler):
    """As Python 3.11.0 to 3.11.3 pickled members of an Enum."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_metadata_of_other_pythons_is_read(folder: Path, protocol: int) -> None:
    expected = shown(read_contents(folder))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    file = io.BytesIO()
    _EnumsByGetattr(file, protocol).dump(metadata)
    data = file.getvalue()
    assert b"getattr" in data
    if protocol == 3:
        assert b"cpathlib\nPosixPath\n" in data
        data = data.replace(b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n")
    (folder / ".metadata").write_bytes(data)
    assert shown(read_contents(folder)) == expected


def test_a_state_that_was_not_flattened_keeps_its_names(folder: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.planner_data = None

    edit(folder, change)
    assert read_contents(folder).paths["model.0.weight"] == ("model.0.weight",)


# ── hostile ───────────────────────────────────────────────────────────────────────────────────


def test_an_object_in_metadata_never_runs_and_is_named(folder: Path, tmp_path: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.planner_data = {"x": Bomb(tmp_path / "ran")}

    edit(folder, change)
    assert "names posix.mkdir" in refusal(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "bytearray"),
        ("os", "system"),
        ("torch", "load"),
        ("torch.serialization", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch", "Tensor"),
        ("functools", "partial"),
    ],
)
def test_any_other_name_is_refused(folder: Path, module: str, name: str) -> None:
    (folder / ".metadata").write_bytes(f"c{module}\n{name}\n(tR.".encode())
    assert f"names {module}.{name}" in refusal(folder)


def test_getattr_reaches_nothing_but_memory_formats(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(ctorch\nSize\nV__class__\ntR.")
    assert "names builtins.getattr" in refusal(folder)


@pytest.mark.parametrize("kind", ["torch\nSize", "torch.distributed.checkpoint.metadata\nMetadata"])
def test_stand_ins_cannot_be_changed_from_a_file(folder: Path, kind: str) -> None:
    # BUILD on a class itself, with attributes for `setattr`
    good = (folder / ".metadata").read_bytes()
    expected = shown(read_contents(folder))
    (folder / ".metadata").write_bytes(f"c{kind}\n(N(dV__new__\nNstb.".encode())
    refusal(folder)
    (folder / ".metadata").write_bytes(good)
    assert shown(read_contents(folder)) == expected


def test_metadata_cut_short_anywhere_is_one_line(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    for length in range(0, len(data), max(1, len(data) // 60)):
        (folder / ".metadata").write_bytes(data[:length])
        assert "cut short" in refusal(folder)


def test_changed_bytes_of_metadata_do_nothing_worse_than_a_refusal(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(len(data))] = chance.randrange(256)
        (folder / ".metadata").write_bytes(changed)
        try:
            read_contents(folder)
        except FormatError:
            refused += 1
    assert refused > 200


# ── what chunks must be ───────────────────────────────────────────────────────────────────────


def chunks_of(*places: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    """A change that gives `model.0.weight`, which is 3x4, other chunks."""

    def change(metadata: Any) -> None:
        name = "model.0.weight"
        whole = metadata.storage_data[MetadataIndex(name, (0, 0))]
        metadata.state_dict_metadata[name].chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in places
        ]
        for offsets, _ in places:
            metadata.storage_data[MetadataIndex(name, offsets)] = whole

    return change


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([], "has a gap at [0, 0]"),
        ([((0, 0), (2, 4))], "has a gap at [2, 0]"),
        ([((0, 0), (3, 2)), ((1, 2), (2, 2))], "has a gap at [0, 2]"),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "has chunks that overlap at [1, 0]"),
        # as many elements as the whole, which a sum would not notice
        ([((0, 0), (2, 3)), ((1, 1), (2, 3))], "has a gap at [0, 3]"),
        ([((0, 0), (3, 4)), ((3, 0), (1, 4))], "reaches beyond its end"),
        ([((0,), (3,))], "another number of dimensions"),
        ([((0, 0), (1 << 40, 4))], "reaches beyond its end"),
    ],
)
def test_chunks_that_do_not_cover_a_tensor_once_are_refused(
    folder: Path, places: Any, words: str
) -> None:
    edit(folder, chunks_of(*places))
    message = refusal(folder)
    assert words in message
    assert "model.0.weight" in message


@pytest.mark.parametrize(
    "places",
    [
        [((0, 0), (1, 4)), ((1, 0), (2, 4))],
        [((0, 0), (3, 1)), ((0, 1), (3, 3))],
        [((0, 0), (2, 3)), ((2, 0), (1, 1)), ((2, 1), (1, 3)), ((0, 3), (2, 1))],
        [((0, 0), (3, 4)), ((3, 0), (0, 4))],  # an empty shard
        [((0, 0), (3, 4)), ((0, 0), (3, 4))],  # listed by two ranks
    ],
)
def test_chunks_that_cover_a_tensor_once_are_taken(folder: Path, places: Any) -> None:
    edit(folder, chunks_of(*places))
    chunks = read_contents(folder).tensors["model.0.weight"].chunks
    assert sum(chunk.shape[0] * chunk.shape[1] for chunk in chunks) == 12


def test_a_tensor_larger_than_its_bytes_is_refused_before_memory_is_taken(folder: Path) -> None:
    def change(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata["model.0.weight"]
        tensor.size = tensor.chunks[0].sizes = torch.Size([1 << 40, 4])

    edit(folder, change)
    assert "in too few bytes" in refusal(folder)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("relative_path", "../secret", "not a plain file name"),
        ("relative_path", "/etc/passwd", "not a plain file name"),
        ("relative_path", "gone.distcp", "is missing"),
        ("relative_path", 7, "has no file"),
        ("offset", -1, "lengths that are none"),
        ("offset", 1 << 50, "should end at"),
        ("length", "many", "lengths that are none"),
        ("transform_descriptors", ("zstd",), "encoded by an extension"),
    ],
)
def test_a_place_outside_the_folder_is_refused(
    folder: Path, field: str, value: Any, words: str
) -> None:
    def change(metadata: Any) -> None:
        setattr(metadata.storage_data[MetadataIndex("name")], field, value)

    edit(folder, change)
    assert words in refusal(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.storage_data.pop(MetadataIndex("name")), "is stored nowhere"),
        (lambda m: setattr(m, "storage_data", None), "has no storage_data"),
        (lambda m: m.state_dict_metadata.update(name=7), "neither tensor nor bytes"),
        (lambda m: m.planner_data.update(name=()), "no place in the state"),
        (lambda m: m.planner_data.update(name=(1.5,)), "a place of another kind"),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(
    folder: Path, change: Callable[[Any], None], words: str
) -> None:
    edit(folder, change)
    assert words in refusal(folder)


def test_a_data_file_cut_short_is_refused(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1)
    assert "was cut short" in refusal(folder)
