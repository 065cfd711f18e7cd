"""Odd processes, paths and options: the writer starts, or one line says why not."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt import Checkpointer, ConfigError, SaveFailed, load_generation

STATE = {"t": torch.arange(10.0)}


def _round_trip(root: str | Path, **how: Any) -> bool:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(STATE, 1, **how).wait()
        target = {"t": torch.zeros(10)}
        generation = checkpointer.resume(target)
        return generation is not None and torch.equal(target["t"], STATE["t"])


def test_a_search_path_may_hold_what_is_not_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/somewhere")])
    assert _round_trip(tmp_path)


def test_the_working_directory_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert _round_trip(tmp_path / "run")


def test_the_working_directory_may_hold_modules_named_as_those_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in ("json", "logging", "queue", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the one of Python')")
    assert _round_trip(tmp_path / "run")


def test_names_may_be_bytes_that_are_no_text(tmp_path: Path) -> None:
    root = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    assert _round_trip(root, folder=os.fsdecode(b"step\xff"))


def test_a_folder_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(STATE, 1, folder="~/elsewhere/first")
    assert (tmp_path / "elsewhere/first/manifest.json").exists()


def test_a_writer_that_cannot_start_costs_saves_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "no python"))
        assert checkpointer.resume(dict(STATE)) is None
        checkpointer.save(STATE, 1)  # maps the slab
        gc.collect()  # what earlier tests left in cycles must not go in between
        open_before = len(os.listdir("/proc/self/fd"))
        assert checkpointer.save(STATE, 2).state == "failed"
        assert len(os.listdir("/proc/self/fd")) == open_before
    assert checkpointer.save(STATE, 3).wait() is not None
    with pytest.raises(SaveFailed, match="no python"):
        checkpointer.close()
    assert load_generation(tmp_path, 3)["t"].equal(STATE["t"])


def test_tags_and_framework_are_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="framework"):
        Checkpointer(tmp_path, framework={"mine": 2})  # type: ignore[dict-item]
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ConfigError, match="permanent"):
        checkpointer.save(STATE, 1, tags="permanent")


def test_a_negated_view_is_filled_with_what_it_was(tmp_path: Path) -> None:
    view = torch.randn(4, dtype=torch.complex64).conj().imag
    assert view.is_neg()
    expected = view.clone()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"view": view}, 1)
        checkpointer.wait()
        view.zero_()
        checkpointer.load({"view": view})
    assert torch.equal(view, expected)
