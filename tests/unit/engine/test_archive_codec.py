"""An archive in a codec of its own: the same generation in fewer bytes, and a way back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt import Checkpointer, ConfigError, KeepLast, load_generation
from torch_ckpt.cli.main import run
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.writer.promote import Promoter

SIZE = 3_000_000


def state_of(step: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(step)
    return {
        "large": torch.randn(SIZE, generator=made),
        "half": torch.randn(SIZE, generator=made).bfloat16(),
        "zeros": torch.zeros(SIZE, dtype=torch.int64),
        "small": torch.rand(7, generator=made),
        "step": step,
    }


def archived(tmp_path: Path, *steps: int, codec: Any = "zstd", **options: Any) -> None:
    with Checkpointer(
        tmp_path / "root",
        archive=tmp_path / "archive",
        archive_codec=codec,
        **{"keep": KeepLast(1), **options},
    ) as checkpointer:
        checkpointer.resume(state_of(0))
        for step in steps:
            checkpointer.save(state_of(step), step).wait("archived", 60)


def assert_is(found: dict[str, Any], step: int) -> None:
    wanted = state_of(step)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = torch.equal(found[name], value) if name != "step" else found[name] == value
        assert same, name


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("codec", ["zstd", "auto"])
def test_the_archive_has_the_same_generation_in_its_own_codec(tmp_path: Path, codec: str) -> None:
    archived(tmp_path, 1, 2, codec=codec)
    archive = LocalStore(str(tmp_path / "archive"))
    both = Catalog(archive).committed()
    assert [one.step for one in both] == [2, 1]
    for one in both:
        assert verify(archive, one).ok
        assert_is(load_generation(archive.url, folder=one.folder), one.step)
    root = tmp_path / "root" / both[0].folder
    assert next(root.glob("*.safetensors")), "raw in the root"
    if codec == "zstd":  # whether it pays is for `auto` to measure
        assert list((tmp_path / "archive" / both[0].folder).glob("*.safetensors")) == []
        assert bytes_of(tmp_path / "archive" / both[0].folder) < 0.6 * bytes_of(root)


def test_by_itself_the_archive_gets_raw_shards_until_a_slow_way_was_measured(
    tmp_path: Path,
) -> None:
    options = {"archive": tmp_path / "archive", "bandwidth_limit": 2e6}
    state = {"w": torch.randn(SIZE // 8).bfloat16(), "zeros": torch.zeros(SIZE // 8)}
    with Checkpointer(tmp_path / "root", **options) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state, step).wait("archived", 60)
    kinds = [
        {path.suffix for path in (tmp_path / "archive" / f"step-{step:010d}").iterdir()}
        for step in (1, 2, 3)
    ]
    assert kinds == [{".json", ".safetensors"}, {".json", ".blocks"}, {".json", ".blocks"}]
    archive = LocalStore(str(tmp_path / "archive"))
    assert all(verify(archive, one).ok for one in Catalog(archive).committed())


def test_a_run_comes_back_from_an_archive_with_a_codec(tmp_path: Path) -> None:
    archived(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "root")
    state = state_of(0)
    with Checkpointer(
        tmp_path / "root", archive=tmp_path / "archive", archive_codec="zstd", keep=KeepLast(1)
    ) as checkpointer:
        generation = checkpointer.resume(state)
        assert generation is not None
        assert generation.step == 2
        assert_is(state, 2)
        checkpointer.save(state_of(3), 3).wait("archived", 60)
    steps = [one.step for one in Catalog(LocalStore(str(tmp_path / "archive"))).committed()]
    assert steps == [3, 2, 1]


def test_both_copies_are_one_generation_for_lists_tags_and_retention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archived(tmp_path, 1)
    places = [str(tmp_path / "root"), "--archive", str(tmp_path / "archive")]
    assert run(["tag", *places[:1], "1", "permanent", *places[1:]]) == 0
    assert run(["ls", *places, "--json"]) == 0
    listed = capsys.readouterr().out
    assert listed.count('"folder"') == 1
    assert run(["verify", *places, "--all"]) == 0
    for tier in ("root", "archive"):
        (one,) = Catalog(LocalStore(str(tmp_path / tier))).committed()
        assert "permanent" in one.tags


def test_what_an_earlier_run_promoted_raw_stays_and_the_rest_is_encoded(tmp_path: Path) -> None:
    archived(tmp_path, 1, codec="raw")
    (archive,) = (tmp_path / "archive").glob("step-*")
    (archive / "manifest.json").unlink()
    next(archive.glob("*.json")).unlink()  # cut after its shard
    archived(tmp_path, 2, codec="zstd")
    store = LocalStore(str(tmp_path / "archive"))
    assert [one.step for one in Catalog(store).committed()] == [2, 1]
    for one in Catalog(store).committed():
        assert_is(load_generation(store.url, folder=one.folder), one.step)
        assert not list((tmp_path / "archive" / one.folder).glob("*.safetensors")), "no litter"


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("gone", ["rank-*.json", "rank-*s"])
def test_what_somebody_removed_from_the_archive_is_sent_again_before_the_root_lets_go(
    tmp_path: Path, codec: str, gone: str
) -> None:
    archived(tmp_path, 1, codec=codec)
    next((tmp_path / "archive" / "step-0000000001").glob(gone)).unlink()
    archived(tmp_path, 2, codec=codec)
    store = LocalStore(str(tmp_path / "archive"))
    committed = Catalog(store).committed()
    assert [one.step for one in committed] == [2, 1]
    assert all(verify(store, one).ok for one in committed)
    assert not (tmp_path / "root" / "step-0000000001").exists()


def test_what_others_build_on_is_archived_as_it_is(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", incremental=True) as checkpointer:
        for step in (1, 2):
            checkpointer.save({**state_of(1), "step": step}, step, block="committed")
    archived(tmp_path, 3)
    store = LocalStore(str(tmp_path / "archive"))
    assert [one.step for one in Catalog(store).committed()] == [3, 2, 1]
    assert all(verify(store, one).ok for one in Catalog(store).committed())
    assert load_generation(store.url, step=2)["step"] == 2


def test_a_codec_for_the_archive_needs_an_archive_and_a_raw_root(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="archive="):
        Checkpointer(tmp_path / "root", archive_codec="zstd")
    with pytest.raises(ConfigError, match="incremental=False"):
        Checkpointer(
            tmp_path / "root", archive=tmp_path / "a", archive_codec="zstd", incremental=True
        )


def test_what_was_cut_while_it_was_encoded_is_taken_up_raw(tmp_path: Path) -> None:
    archived(tmp_path, 1, codec="zstd")
    (archive,) = (tmp_path / "archive").glob("step-*")
    (archive / "manifest.json").unlink()
    next(archive.glob("*.json")).unlink()  # cut after its shard
    archived(tmp_path, 2, codec="raw")
    store = LocalStore(str(tmp_path / "archive"))
    assert [one.step for one in Catalog(store).committed()] == [2, 1]
    assert_is(load_generation(store.url, step=1), 1)
    names = {path.suffix for path in archive.iterdir()}
    assert names == {".json", ".safetensors"}, "no litter"


def test_a_way_is_not_judged_by_a_few_bytes(tmp_path: Path) -> None:
    """A promotion that was cut before its part sends that alone: its speed is that of a request."""
    save = {"keep": None, "archive_codec": "raw"}
    state = {"w": torch.randn(SIZE // 8).bfloat16()}
    with Checkpointer(tmp_path / "root", archive=tmp_path / "archive", **save) as checkpointer:
        checkpointer.save(state, 1).wait("archived", 60)
    folder = tmp_path / "archive" / "step-0000000001"
    (folder / "manifest.json").unlink()
    next(folder.glob("rank-*.json")).unlink()
    root, archive = LocalStore(str(tmp_path / "root")), LocalStore(str(tmp_path / "archive"))
    (one,) = Catalog(root).committed()
    promoter = Promoter(root, archive, rank=0, world_size=1, pace=lambda _: None, codec="auto")
    promoter.send(one)
    with Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.resume(state)
        checkpointer.save(state, 2)
    newer = Catalog(root).find(step=2)
    promoter.send(newer)
    assert not list((tmp_path / "archive" / newer.folder).glob("*.blocks"))
