"""Which paths and URLs mean the same place, and who takes them for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torch_ckpt.config import Config
from torch_ckpt.places import Places
from torch_ckpt.storage.spelling import place_of, same_place
from torch_ckpt.writer.orphan import address, listen

SAME = [
    ("s3://bucket/x", "s3a://bucket/x"),
    ("s3://bucket/x", "S3://bucket/x//"),
    ("s3://bucket/x", "s3://bucket//x/"),
    ("s3://bucket", "s3a://bucket/"),
    ("gs://bucket/x", "gcs://bucket/x/"),
    ("az://box/x", "abfs://box/x/"),
    ("az://box/x", "abfss://box/x"),
    ("az://box@us/x", "abfss://box@us.dfs.core.windows.net/x"),
    ("memory://runs/x", "memory:///runs/x/"),
    ("simplecache::s3://bucket/x", "simplecache::s3://bucket/x/"),
    ("/runs/x", "file:///runs/x/"),
    ("/runs/x", "local:///runs/y/../x"),
]

OTHERS = [
    ("s3://bucket/x", "s3://bucket/X"),
    ("s3://bucket/x", "s3://bucket/x/y"),
    ("s3://bucket/x", "s3://other/x"),
    ("s3://bucket/x", "gs://bucket/x"),
    ("s3://bucket/x", "simplecache::s3://bucket/x"),
    ("s3://bucket/x", "/bucket/x"),
    ("az://box@us/x", "az://box@eu/x"),
    ("s3://bucket/x?y", "s3://bucket/x"),
    ("s3://bucket/x y", "s3://bucket/x%20y"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_two_spellings_of_a_place_are_the_same(one: str, other: str) -> None:
    assert place_of(one) == place_of(other)
    assert same_place(one, other)
    assert place_of(place_of(one)) == place_of(one)


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_two_places_are_not(one: str, other: str) -> None:
    assert place_of(one) != place_of(other)
    assert not same_place(one, other)


def test_links_and_a_home_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert place_of("~/link") == place_of(f"file://{tmp_path}/run/") == str(tmp_path / "run")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no abstract sockets")
def test_a_run_has_one_writer_on_a_node_however_its_root_is_spelt() -> None:
    one = listen("s3://bucket/x", 0)
    assert one is not None
    try:
        assert listen("s3a://bucket/x/", 0) is None
        assert address("s3://bucket/x", 0) != address("s3://bucket/x", 1)
    finally:
        one.close()


def test_a_folder_of_the_root_is_of_the_root_however_it_is_spelt(tmp_path: Path) -> None:
    places = Places(Config(root="memory://runs/x"))
    for folder in ("best", "memory://runs/x/best", "memory:///runs/x/best/"):
        assert places.split(folder) == ("memory://runs/x", "best")
    assert places.split("memory://runs/y/best") == ("memory://runs/y", "best")
    places = Places(Config(root=str(tmp_path)))
    for folder in ("best", f"{tmp_path}/best", f"file://{tmp_path}/best"):
        assert places.split(folder) == (str(tmp_path), "best")
    assert places.split("memory://runs/y/best") == ("memory://runs/y", "best")
