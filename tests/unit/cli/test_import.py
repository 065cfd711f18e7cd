"""`import` makes one committed generation of a foreign checkpoint, or leaves nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.cli.conftest import Cli, flip
from tests.unit.foreign.samples import Bomb, edit, same, save_dcp, training_state
from torch_ckpt import Checkpointer, load_generation, save_generation


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of DCP, of step 12."""
    return save_dcp(training_state(), tmp_path / "source")


def snapshot(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))
    }


def test_a_folder_becomes_one_verified_generation(cli: Cli, source: Path, tmp_path: Path) -> None:
    root, before = tmp_path / "run", snapshot(source)

    done = cli("import", source, root)

    assert (done.code, done.err) == (0, "")
    assert f"DCP checkpoint {source} (" in done.out
    assert f"-> step 12 of {root} (step-0000000012)" in done.out
    assert same(load_generation(root), training_state())
    assert cli("verify", root, "--all").code == 0
    assert snapshot(source) == before


def test_training_goes_on_from_an_import(cli: Cli, source: Path, tmp_path: Path) -> None:
    assert cli("import", source, tmp_path / "run").code == 0
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}

    with Checkpointer(tmp_path / "run", distributed=False) as run:
        assert run.resume(state, strict=False).step == 12
        run.save(state, 13, block="committed")

    expected = training_state()
    assert same(model.state_dict(), expected["model"])
    assert same(optimizer.state_dict(), expected["optimizer"])


def test_json_says_what_was_done(cli: Cli, source: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    done = cli("import", source, root, "--step", 7, "--folder", "first.ckpt", "--json")

    found = json.loads(done.out)
    size = found.pop("bytes")
    assert size > 1000
    assert found == {
        "source": str(source),
        "format": "dcp",
        "root": str(root),
        "folder": "first.ckpt",
        "step": 7,
        "dry_run": False,
        "tensors": 25,
        "objects": 23,
        "pickled": [],
    }
    assert same(load_generation(root, 7, folder="first.ckpt"), training_state())


def test_a_dry_run_shows_all_and_writes_nothing(cli: Cli, source: Path, tmp_path: Path) -> None:
    done = cli("import", source, tmp_path / "run", "--dry-run")

    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["tensor", "dtype", "shape", "size"]
    assert ["model.0.weight", "float32", "3x4", "48B"] in [line.split() for line in lines]
    assert "would be step 12" in lines[-1]
    assert not (tmp_path / "run").exists()
    assert json.loads(cli("import", source, tmp_path / "run", "--dry-run", "--json").out)["dry_run"]
    assert not (tmp_path / "run").exists()


def test_a_plain_file_becomes_a_generation(cli: Cli, tmp_path: Path) -> None:
    state = torch.nn.Linear(3, 2).state_dict()
    torch.save(state, tmp_path / "model-40.pt")
    done = cli("import", tmp_path / "model-40.pt", tmp_path / "run")
    assert done.code == 0, done.err
    assert "torch.save checkpoint" in done.out
    loaded = load_generation(tmp_path / "run", 40)
    assert type(loaded) is type(state)
    assert same(dict(loaded), dict(state))


def test_tied_weights_of_a_file_stay_tied(cli: Cli, tmp_path: Path) -> None:
    weight = torch.randn(8, 4)
    torch.save({"in": weight, "out": weight, "step": 1}, tmp_path / "x.pt")
    assert cli("import", tmp_path / "x.pt", tmp_path / "run").code == 0
    loaded = load_generation(tmp_path / "run")
    assert loaded["in"].data_ptr() == loaded["out"].data_ptr()


# ── refused ───────────────────────────────────────────────────────────────────────────────────


def test_a_generation_is_never_replaced(cli: Cli, source: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_generation(root, {"precious": torch.ones(3)}, 12)
    before = snapshot(root)

    for options in ((), ("--step", 12), ("--folder", "step-0000000012", "--step", 3)):
        done = cli("import", source, root, *options)
        assert done.code == 2
        assert "holds a generation already" in done.err
    assert snapshot(root) == before

    assert cli("import", source, root, "--folder", "imported").code == 0
    assert torch.equal(load_generation(root, folder="step-0000000012")["precious"], torch.ones(3))
    flip(root / "imported" / "manifest.json", 100)
    assert "already" in cli("import", source, root, "--folder", "imported").err


def test_without_a_step_it_asks_for_one(cli: Cli, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "last.ckpt")
    done = cli("import", tmp_path / "last.ckpt", tmp_path / "run")
    assert done.code == 2
    assert "give --step" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["item", "file"])
def test_objects_need_permission_and_are_named(cli: Cli, tmp_path: Path, kind: str) -> None:
    state = {"step": 3, "bad": Bomb(tmp_path / "ran"), "error": ValueError("x")}
    if kind == "item":
        source = save_dcp(state, tmp_path / "source")
    else:
        source = tmp_path / "x.ckpt"
        torch.save(state, source)

    done = cli("import", source, tmp_path / "run")

    assert done.code == 2
    assert "posix.mkdir" in done.err
    assert "ValueError" in done.err
    assert "--allow-pickle" in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()

    done = cli("import", source, tmp_path / "run", "--allow-pickle")
    assert done.code == 0
    assert "error (builtins.ValueError)" in done.err
    assert (tmp_path / "ran").is_dir(), "which shows that it would have run"
    assert str(load_generation(tmp_path / "run", allow_pickle=True)["error"]) == "x"


def test_hostile_metadata_is_refused_whatever_is_allowed(
    cli: Cli, source: Path, tmp_path: Path
) -> None:
    def change(metadata: Any) -> None:
        metadata.storage_meta = Bomb(tmp_path / "ran")

    edit(source, change)
    for options in ((), ("--allow-pickle",)):
        done = cli("import", source, tmp_path / "run", *options)
        assert done.code == 1
        assert "names posix.mkdir" in done.err
        assert done.err.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()


def test_a_data_file_cut_short_leaves_nothing(cli: Cli, source: Path, tmp_path: Path) -> None:
    (file,) = source.glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    done = cli("import", source, tmp_path / "run")
    assert done.code == 1
    assert "was cut short" in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_gap_between_chunks_leaves_nothing(cli: Cli, source: Path, tmp_path: Path) -> None:
    def change(metadata: Any) -> None:
        chunk = metadata.state_dict_metadata["model.0.weight"].chunks[0]
        chunk.sizes = torch.Size([2, 4])

    edit(source, change)
    done = cli("import", source, tmp_path / "run")
    assert done.code == 1
    assert "has a gap at [2, 0]" in done.err
    assert not (tmp_path / "run").exists()


def test_what_no_generation_can_hold_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    torch.save({"step": 1, "a": {"sparse": torch.eye(3).to_sparse()}}, tmp_path / "x.pt")
    for options in ((), ("--dry-run",)):
        done = cli("import", tmp_path / "x.pt", tmp_path / "run", *options)
        assert done.code == 2
        assert "a.sparse" in done.err
        assert done.err.count("\n") == 1
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{source}",), "Missing argument 'ROOT'"),
        (("{tmp}/gone", "{root}"), "does not exist"),
        (("s3://bucket/x", "{root}"), "copy it to this machine first"),
        (("{empty}", "{root}"), "has no .metadata"),
        (("{made}/step-0000000001", "{root}"), "is a generation already"),
        (("/dev/null", "{root}"), "neither a file nor a folder"),
        (("{source}", "{source}"), "is one checkpoint"),
        (("{source}", "{made}/step-0000000001"), "is one checkpoint"),
        (("{source}", "{source}/.metadata"), "is a file"),
        (("{source}", "memory://x"), "is no ROOT"),
        (("{source}", "{root}", "--folder", "../x"), "no plain name"),
        (("{source}", "{root}", "--folder", "LATEST"), "the run's own"),
        (("{source}", "{tmp}", "--folder", "source"), "holds other files"),
        (("{source}", "{made}", "--folder", "taken"), "no folder"),
        (("{source}", "{root}", "--step", "-1"), "Invalid value for '--step'"),
    ],
)
def test_an_import_that_cannot_be_is_one_line(
    cli: Cli, source: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    places = {name: tmp_path / name for name in ("empty", "made", "root")}
    places["empty"].mkdir()
    save_generation(places["made"], {"w": torch.ones(1)}, 1)
    (places["made"] / "taken").write_text("precious")
    before = snapshot(tmp_path)

    done = cli("import", *(one.format(source=source, tmp=tmp_path, **places) for one in arguments))

    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert snapshot(tmp_path) == before
