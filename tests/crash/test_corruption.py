"""Nothing that happens to stored files makes a wrong byte reach training, or runs code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.crash import damage
from torch_ckpt import Checkpointer, load_generation, save_generation
from torch_ckpt.errors import (
    CkptError,
    FormatError,
    GenerationNotFound,
    IntegrityError,
    NothingUsable,
    PickleRefused,
    UnexpectedFile,
)
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.verify import verify
from torch_ckpt.manifest.digest import canonical_json, sha256_hex
from torch_ckpt.storage.local import LocalStore

OLD, NEW = "step-0000000001", "step-0000000002"
REFUSED = (IntegrityError, FormatError, UnexpectedFile, FileNotFoundError)


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(3000, generator=generator),
        "half": torch.randn(70, generator=generator).to(torch.bfloat16),
        "count": torch.tensor(step),
        "step": step,
    }


def same(found: dict[str, Any], step: int) -> bool:
    wanted = state(step)
    tensors = ("weight", "half", "count")
    return found["step"] == step and all(torch.equal(found[key], wanted[key]) for key in tensors)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two good generations; never changed."""
    root = tmp_path_factory.mktemp("pristine")
    with Checkpointer(root, keep=None, distributed=False) as saver:
        for step in (1, 2):
            saver.save(state(step), step, block="committed")
    return root


@pytest.fixture
def fresh(pristine: Path, tmp_path: Path) -> Callable[[], Path]:
    """A new copy of the pristine root at every call."""
    count = iter(range(10_000))

    def copy() -> Path:
        root = tmp_path / f"root-{next(count)}"
        shutil.copytree(pristine, root)
        return root

    return copy


def files(root: Path, folder: str = NEW) -> list[Path]:
    return sorted((root / folder).iterdir())


def kind(path: Path) -> str:
    if path.name == "manifest.json":
        return "manifest"
    return "part" if path.suffix == ".json" else "shard"


def resume(root: Path) -> tuple[int | None, dict[str, Any]]:
    """The step a new trainer starts from, and the state it got."""
    into = state(0)
    with Checkpointer(root, distributed=False) as saver:
        found = saver.resume(into)
    return (None if found is None else found.step), into


def assert_refused_and_passed_over(root: Path, path: Path, *, exact: bool = False) -> None:
    """Loading names the file; verifying too; resuming takes the one before and marks this one."""
    name = kind(path)
    with pytest.raises(REFUSED) as caught:
        load_generation(root, folder=NEW)
    if not isinstance(caught.value, GenerationNotFound):
        assert path.name in str(caught.value) or name == "manifest", caught.value
    if isinstance(caught.value, IntegrityError) and name == "shard":
        assert set(caught.value.tensors) <= {"weight", "half", "count"}
        assert caught.value.tensors
    step, into = resume(root)
    assert step == 1
    assert same(into, 1)
    there = {one.folder: one for one in Catalog(LocalStore(str(root))).committed()}
    if name != "manifest":
        assert "damaged" in there[NEW].tags
        assert path.name in there[NEW].tags["damaged"]
    assert not there[OLD].set_apart


def each_file(fresh: Callable[[], Path], change: damage.Damage) -> None:
    """Do something to every file of the newest generation, one at a time."""
    for index in range(3):
        root = fresh()
        path = files(root)[index]
        change(path)
        assert_refused_and_passed_over(root, path)


def test_a_flipped_bit_in_any_file_is_named_by_load_and_verify_and_never_loaded(
    fresh: Callable[[], Path],
) -> None:
    root = fresh()
    for path in files(root):
        good = path.read_bytes()
        for offset in damage.offsets(path):
            for bit in (0, 7):
                damage.flip(offset, bit)(path)
                _assert_named(root, path, offset)
                path.write_bytes(good)
    assert same(load_generation(root), 2)


def _assert_named(root: Path, path: Path, offset: int) -> None:
    store = LocalStore(str(root))
    with pytest.raises((IntegrityError, FormatError)) as caught:
        load_generation(root, folder=NEW)
    assert path.name in str(caught.value)
    if kind(path) == "shard" and offset >= 4096:
        assert isinstance(caught.value, IntegrityError)
        assert caught.value.tensors
    if kind(path) == "manifest":
        assert [folder for folder, _ in Catalog(store).damaged()] == [NEW]
    else:
        report = verify(store, Catalog(store).find(folder=NEW))
        if kind(path) == "part":
            assert path.name in {found.file for found in report.damages}
        else:
            assert {found.file for found in report.damages} == {path.name}


@pytest.mark.parametrize("offset", [0, 4096, -1], ids=["first", "second-page", "last"])
def test_a_flipped_bit_makes_resume_step_back(fresh: Callable[[], Path], offset: int) -> None:
    for index in range(3):
        root = fresh()
        path = files(root)[index]
        if kind(path) == "shard" and offset == 0:
            continue
        if path.stat().st_size <= offset:
            continue
        damage.flip(offset)(path)
        assert_refused_and_passed_over(root, path)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_file_cut_short_is_named_and_passed_over(fresh: Callable[[], Path], keep: float) -> None:
    each_file(fresh, damage.truncate(keep))


def test_a_document_that_grew_is_named_and_passed_over(fresh: Callable[[], Path]) -> None:
    for index in (0, 1):  # bytes after the last block of a shard are nobody's
        root = fresh()
        path = files(root)[index]
        damage.append(path)
        assert_refused_and_passed_over(root, path)


def test_a_file_of_zeros_is_named_and_passed_over(fresh: Callable[[], Path]) -> None:
    each_file(fresh, damage.zero)


def test_a_missing_file_is_named_and_passed_over(fresh: Callable[[], Path]) -> None:
    each_file(fresh, damage.delete)


@pytest.mark.parametrize(
    "change",
    [damage.become_link, damage.become_pipe, damage.become_folder],
    ids=lambda f: f.__name__,
)
def test_what_is_no_plain_file_any_more_is_named_and_passed_over(
    fresh: Callable[[], Path], change: damage.Damage
) -> None:
    began = time.monotonic()
    each_file(fresh, change)
    assert time.monotonic() - began < 60  # a pipe that nobody writes to must not hold a reader


def test_files_swapped_within_or_between_generations_are_refused(
    fresh: Callable[[], Path],
) -> None:
    for pick in range(3):
        root = fresh()
        path = files(root)[pick]
        damage.swap(path, files(root, OLD)[pick])
        if kind(path) == "manifest":
            with pytest.raises(NothingUsable):
                resume(root)
        else:
            with pytest.raises(REFUSED) as caught:
                load_generation(root, folder=NEW)
            assert path.name in str(caught.value)
            with pytest.raises(NothingUsable):
                resume(root)
    root = fresh()
    part, shard = files(root)[1:]
    damage.swap(part, shard)
    assert_refused_and_passed_over(root, part)


def test_damage_everywhere_is_an_error_and_an_empty_root_a_fresh_run(
    fresh: Callable[[], Path], tmp_path: Path
) -> None:
    root = fresh()
    shards = [
        path for folder in (OLD, NEW) for path in files(root, folder) if kind(path) == "shard"
    ]
    for path in shards:
        damage.flip(-1)(path)
    with pytest.raises(NothingUsable) as caught:
        resume(root)
    assert all(path.name in str(caught.value) for path in shards)
    with pytest.raises(NothingUsable):  # also the second time, when both are quarantined
        resume(root)
    step, into = resume(tmp_path / "nothing-yet")
    assert step is None
    assert same(into, 0)


@pytest.mark.parametrize("gone", ["*.json", "*.safetensors"])
def test_loading_a_step_of_which_a_file_is_gone_says_that_it_is_damaged(
    fresh: Callable[[], Path], gone: str
) -> None:
    root = fresh()
    next((root / NEW).glob(f"rank-{gone}")).unlink()
    for into in (None, state(0)):
        with pytest.raises(FormatError, match="is missing, so this generation is damaged"):
            load_generation(root, folder=NEW, into=into)


def test_loading_a_step_whose_manifest_is_damaged_says_so(fresh: Callable[[], Path]) -> None:
    root = fresh()
    damage.flip(40)(root / NEW / "manifest.json")
    with pytest.raises(GenerationNotFound, match=f"damaged: {NEW}"):
        load_generation(root, 2)


class Bomb:
    """Does something when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def test_a_pickle_planted_in_any_file_never_runs(fresh: Callable[[], Path], tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    bomb = pickle.dumps(Bomb(trace))
    for index in range(3):
        for keep_size in (False, True):
            root = fresh()
            path = files(root)[index]
            size = path.stat().st_size
            path.write_bytes((bomb * (1 + size // len(bomb)))[:size] if keep_size else bomb)
            assert_refused_and_passed_over(root, path)
    torch.save(Bomb(trace), tmp_path / "torch")
    for index in range(3):
        root = fresh()
        path = files(root)[index]
        shutil.copy(tmp_path / "torch", path)
        assert_refused_and_passed_over(root, path)
    assert not trace.exists()


def test_a_pickle_that_was_saved_is_refused_by_name_unless_allowed(tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    save_generation(tmp_path / "run", {"x": torch.ones(2), "bomb": Bomb(trace)}, 1)
    with pytest.raises(PickleRefused, match="bomb"):
        load_generation(tmp_path / "run")
    with (
        Checkpointer(tmp_path / "run", distributed=False) as saver,
        pytest.raises(PickleRefused, match="bomb"),
    ):
        saver.resume({"x": torch.zeros(2), "bomb": None})
    assert not trace.exists()


Doc = dict[str, Any]


def rewrite(root: Path, change_part: Callable[[Doc], None], change_manifest: Any = None) -> None:
    """Change documents as somebody would who can compute every digest."""
    manifest_path = root / NEW / "manifest.json"
    part_path = next(path for path in files(root) if kind(path) == "part")
    part = json.loads(part_path.read_text())
    change_part(part)
    data = canonical_json(part)
    part_path.write_bytes(data)
    manifest = json.loads(manifest_path.read_text())
    manifest["parts"][0].update(bytes=len(data), sha256=sha256_hex(data))
    manifest["bytes"] = sum(file["bytes"] for file in part["files"])
    if change_manifest is not None:
        change_manifest(manifest)
    del manifest["sha256"]
    manifest["sha256"] = sha256_hex(canonical_json(manifest))
    manifest_path.write_bytes(canonical_json(manifest))


def nothing(part: Doc) -> None:
    """Leave the part as it is."""


def test_rewriting_alone_changes_nothing(fresh: Callable[[], Path]) -> None:
    root = fresh()
    rewrite(root, nothing)
    assert same(load_generation(root, folder=NEW), 2)


EVIL_NAMES = ["../secret.safetensors", "/etc/passwd", "..", "a/b.safetensors", "", "x\\y", "LATEST"]


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_names_that_leave_the_folder_are_refused(fresh: Callable[[], Path], name: str) -> None:
    root = fresh()
    rewrite(root, lambda part: part["files"][0].update(name=name))
    with pytest.raises(FormatError, match="names"):
        load_generation(root, folder=NEW)
    assert resume(root)[0] == 1
    root = fresh()
    rewrite(root, nothing, lambda manifest: manifest["parts"][0].update(name=name))
    with pytest.raises(FormatError, match="names"):
        load_generation(root, folder=NEW)
    assert resume(root)[0] == 1


@pytest.mark.parametrize("size", [1 << 50, 1 << 63, -1, 1e300, "9" * 30])
@pytest.mark.parametrize("field", ["bytes", "raw_bytes", "offset"])
def test_giant_declared_sizes_are_refused_before_memory_is_taken(
    fresh: Callable[[], Path], field: str, size: Any
) -> None:
    root = fresh()
    rewrite(root, lambda part: part["blocks"][0].update({field: size}))
    with pytest.raises((FormatError, IntegrityError)):
        load_generation(root, folder=NEW)
    assert resume(root)[0] == 1


def test_a_giant_shape_is_refused(fresh: Callable[[], Path]) -> None:
    root = fresh()

    def grow(part: Doc) -> None:
        text = json.dumps(part["tensors"])
        part["tensors"] = json.loads(text.replace("3000", str(1 << 45)))

    rewrite(root, grow)
    with pytest.raises((FormatError, IntegrityError)):
        load_generation(root, folder=NEW)
    assert resume(root)[0] == 1


def test_a_document_that_is_too_long_is_refused_unread(fresh: Callable[[], Path]) -> None:
    for index in (0, 1):
        root = fresh()
        os.truncate(files(root)[index], 3 << 30)  # sparse: takes no space
        began = time.monotonic()
        assert_refused_and_passed_over(root, files(root)[index])
        assert time.monotonic() - began < 20


def test_a_folder_that_is_a_link_out_of_the_root_is_not_a_generation(
    fresh: Callable[[], Path], tmp_path: Path
) -> None:
    root = fresh()
    shutil.move(root / NEW, tmp_path / "elsewhere")
    (root / NEW).symlink_to(tmp_path / "elsewhere")
    assert resume(root)[0] == 1
    with pytest.raises(CkptError, match="symbolic link"):
        load_generation(root, folder=NEW)
