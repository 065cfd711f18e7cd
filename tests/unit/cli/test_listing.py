"""`ls` and `show` tell what is there, whole and without a word of torch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.cli.conftest import PROGRAM, Cli, on_terminal, shard_in
from torch_ckpt import save_generation
from torch_ckpt.manifest.commit import update_tags
from torch_ckpt.storage.local import LocalStore


def test_ls_lists_every_state_a_folder_can_be_in(cli: Cli, root: Path) -> None:
    update_tags(LocalStore(str(root)), "step-0000000003", add={"aside": "went back"})
    update_tags(LocalStore(str(root)), "step-0000000002", add={"damaged": "a bit flipped"})
    (root / "step-0000000001" / "manifest.json").write_text("{")
    (root / "step-0000000009").mkdir()
    (root / "notes").mkdir()

    done = cli("ls", root, "--json")

    assert done.code == 0
    found = json.loads(done.out)
    assert {row["folder"]: row["state"] for row in found["generations"]} == {
        "epoch=0-step=4.ckpt": "committed",
        "step-0000000003": "set aside",
        "step-0000000002": "quarantined",
        "step-0000000001": "damaged",
        "step-0000000009": "unfinished",
    }
    newest = found["generations"][0]
    assert newest["step"] == 4
    assert newest["tags"] == {"permanent": ""}
    assert newest["metrics"] == {"acc": "nan"}
    assert newest["world_size"] == 1
    assert newest["bytes"] > 64 * 32 * 4


def test_ls_in_a_pipe_is_aligned_text_with_every_column_filled(cli: Cli, root: Path) -> None:
    done = cli("ls", root)

    lines = done.out.splitlines()
    heading = "step  folder  size  world size  tags  metrics  created  state"
    assert [part.strip() for part in lines[0].split("  ") if part] == heading.split("  ")
    assert len(lines) == 5
    assert "epoch=0-step=4.ckpt" in lines[1]
    assert "val_loss=0.7" in lines[2]
    assert done.out.isascii()
    assert done.err == ""


def test_ls_on_a_terminal_is_a_table_that_fits(root: Path) -> None:
    code, shown = on_terminal("ls", root, columns=70)

    assert code == 0
    assert "─" in shown
    assert max(map(len, shown.splitlines())) <= 70


def test_ls_takes_one_generation_and_a_link_to_it(cli: Cli, root: Path) -> None:
    (root / "last.ckpt").symlink_to("epoch=0-step=4.ckpt")

    for place in (root / "epoch=0-step=4.ckpt", root / "last.ckpt"):
        rows = json.loads(cli("ls", place, "--json").out)["generations"]
        assert [row["step"] for row in rows] == [4]


def test_an_empty_folder_is_no_error_of_ls_and_has_nothing_to_show(
    cli: Cli, tmp_path: Path
) -> None:
    done = cli("ls", tmp_path)
    assert (done.code, done.out) == (0, "")
    assert done.err == f"torch-ckpt: no generation in {tmp_path}\n"
    assert json.loads(cli("ls", tmp_path, "--json").out)["generations"] == []

    done = cli("show", tmp_path)
    assert done.code == 2
    assert "nothing is committed there" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "{tmp}/nowhere"), "does not exist"),
        (("ls", "memory://run"), "lives in the memory of the process that made it"),
        (("ls", "{tmp}/file"), "is a file"),
        (("ls", "nosuchscheme://x/y"), "nosuchscheme"),
        (("ls", ""), "ROOT is empty"),
        (("ls",), "Missing argument 'ROOT'; see `torch-ckpt ls --help`"),
        (("lst",), "No such command 'lst'"),
        (("show", "{tmp}", "x"), "'x' is not a valid integer"),
        (("show", "{tmp}", "7"), "no generation of step 7"),
        (("verify", "{tmp}", "7", "--all"), "give STEP or --all, not both"),
    ],
)
def test_a_users_mistake_is_one_line_and_code_2(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "file").write_text("")

    done = cli(*(argument.format(tmp=tmp_path) for argument in arguments))

    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("torch-ckpt: ")
    assert done.err.count("\n") == 1
    assert message in done.err


def test_names_cannot_control_the_terminal(cli: Cli, root: Path) -> None:
    os.rename(root / "step-0000000001", root / "evil\x1b[2J\nname")

    done = cli("ls", root)

    assert "\x1b" not in done.out
    assert "evil\\x1b[2J\\nname" in done.out
    assert len(done.out.splitlines()) == 5


def test_show_lists_tensors_ties_and_objects(cli: Cli, root: Path) -> None:
    found = json.loads(cli("show", root, "2", "--json").out)

    assert found["step"] == 2
    assert found["parent"]["step"] == 1
    assert found["metrics"] == {"val_loss": 0.5}
    assert found["framework"]["lightning"] == "2.6"
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert tensors["model.weight"]["shape"] == [64, 32]
    assert tensors["model.head"]["tied_to"] == "model.weight"
    assert tensors["z"]["dtype"] == "complex64"
    assert "array" not in tensors
    objects = {item["path"]: item for item in found["objects"]}
    assert objects["step"]["value"] == 2
    assert objects["rate"]["value"] == {"$float": "inf"}
    assert objects["shape.1"]["value"] == "two"
    assert objects["array"]["kind"] == "ndarray"
    assert not any(item["pickled"] for item in found["objects"])


def test_show_without_a_step_is_what_a_run_resumes_from(cli: Cli, root: Path) -> None:
    update_tags(LocalStore(str(root)), "epoch=0-step=4.ckpt", add={"aside": "went back"})

    assert json.loads(cli("show", root, "--json").out)["step"] == 3
    assert json.loads(cli("show", root, "4", "--json").out)["state"] == "set aside"
    assert "model.weight" in cli("show", root).out


def test_show_flags_what_was_pickled(cli: Cli, tmp_path: Path) -> None:
    save_generation(tmp_path, {"odd": ValueError("x")}, 1)

    done = cli("show", tmp_path)

    assert "PICKLED builtins.ValueError" in done.out
    assert "1 object pickled" in done.err
    assert json.loads(cli("show", tmp_path, "--json").out)["objects"][0]["pickled"] is True


def test_show_of_a_damaged_document_is_code_1(cli: Cli, root: Path) -> None:
    (root / "step-0000000002" / "manifest.json").write_text("{")
    assert cli("show", root, 2).code == 1
    (part,) = (root / "step-0000000003").glob("rank-*.json")
    part.write_bytes(part.read_bytes()[:-1])

    done = cli("show", root, 3)

    assert done.code == 1
    assert part.name in done.err
    assert done.err.count("\n") == 1


def test_commands_that_need_no_torch_import_none(root: Path) -> None:
    lines = [
        ["ls", str(root)],
        ["show", str(root)],
        ["verify", str(root), "--all"],
        ["prune", str(root), "--keep", "last=1", "--dry-run", "--litter"],
        ["tag", str(root), "1", "permanent"],
        ["untag", str(root), "1", "permanent"],
        ["export", "--help"],
        ["prefetch", str(root), "--to", str(root.parent / "cache")],
        ["ls", str(root), "--archive", str(root.parent / "cache")],
        ["--help"],
    ]
    script = (
        "import sys\nfrom torch_ckpt.cli.main import run\n"
        f"codes = [run(line) for line in {lines!r}]\n"
        "sys.exit(any(codes) or bool({'torch', 'numpy', 'rich', 'fsspec'} & set(sys.modules)))"
    )
    done = subprocess.run([PROGRAM[0], "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_has_enough_is_no_error(root: Path) -> None:
    shards = root / "step-0000000001"
    for number in range(2000):  # more rows than a pipe holds
        (root / f"step-{number + 10:010d}").mkdir()
    assert shard_in(shards).exists()

    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*PROGRAM, "ls", root], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)

    assert done.stderr == ""
    assert done.returncode == 141
