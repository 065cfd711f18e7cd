"""`verify` names all damage, `prune` deletes what it said it would, tags decide what stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.unit.cli.conftest import Cli, flip, on_terminal, shard_in
from torch_ckpt import Checkpointer
from torch_ckpt.writer.orphan import listen


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_sound_generations_verify(cli: Cli, root: Path) -> None:
    done = cli("verify", root)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("epoch=0-step=4.ckpt: sound, ")

    found = json.loads(cli("verify", root, "--all", "--json").out)
    assert found["ok"] is True
    assert [one["step"] for one in found["generations"]] == [4, 3, 2, 1]


def test_damage_names_file_and_tensor_with_code_1(cli: Cli, root: Path) -> None:
    shard = shard_in(root / "step-0000000002")
    flip(shard, -1)

    done = cli("verify", root, 2)

    assert done.code == 1
    assert shard.name in done.out
    assert "holds model." in done.out
    assert done.err == "torch-ckpt: 1 of 1 generation damaged\n"
    assert cli("verify", root).code == 0  # another one
    found = json.loads(cli("verify", root, "--all", "--json").out)
    assert found["ok"] is False
    (damaged,) = [one for one in found["generations"] if not one["ok"]]
    assert damaged["folder"] == "step-0000000002"
    assert damaged["damages"][0]["file"] == shard.name
    assert damaged["damages"][0]["tensors"]


def test_a_lost_shard_and_a_broken_manifest_are_damage(cli: Cli, root: Path) -> None:
    shard_in(root / "step-0000000003").unlink()
    assert cli("verify", root / "step-0000000003").code == 1

    (root / "step-0000000001" / "manifest.json").write_bytes(b"")
    for arguments in ((), (1,), ("--all",)):
        done = cli("verify", root, *arguments)
        assert done.code == 1
        assert "step-0000000001/manifest.json" in done.out + done.err
    assert cli("verify", root / "step-0000000001").code == 1


def test_a_run_whose_only_manifest_is_broken_is_damaged_not_empty(
    cli: Cli, root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "step-0000000001", tmp_path / "one" / "step-0000000001")
    (tmp_path / "one" / "step-0000000001" / "manifest.json").write_text("[]")

    assert cli("verify", tmp_path / "one").code == 1
    assert cli("show", tmp_path / "one").code == 1


def test_progress_is_for_terminals(root: Path) -> None:
    code, shown = on_terminal("verify", root, "--all", columns=100)

    assert code == 0
    assert "━" in shown
    assert "step-0000000001: sound" in shown


def test_dry_run_says_why_and_deletes_nothing(cli: Cli, root: Path) -> None:
    before = folders(root)

    done = cli("prune", root, "--keep", "last=1,best=val_loss", "--dry-run", "--json")

    found = json.loads(done.out)
    assert found["deleted"] is False
    verdicts = {one["step"]: (one["kept"], one["reason"]) for one in found["verdicts"]}
    assert verdicts[4] == (True, "permanent and the newest")
    assert verdicts[2] == (True, "the best by val_loss (0.5)")
    assert verdicts[1] == (False, "no rule keeps it")
    assert folders(root) == before
    assert "no rule keeps it" in cli("prune", root, "--keep", "last=1", "--dry-run").out


def test_prune_in_a_pipe_needs_yes(cli: Cli, root: Path) -> None:
    before = folders(root)
    done = cli("prune", root, "--keep", "last=2")
    assert done.code == 2
    assert "add --yes" in done.err
    assert folders(root) == before

    done = cli("prune", root, "--keep", "last=2", "--yes")
    assert done.code == 0
    assert "deleted 2 generations" in done.out
    assert folders(root) == ["epoch=0-step=4.ckpt", "step-0000000003"]
    assert cli("prune", root, "--keep", "last=2").code == 0  # nothing to ask about


@pytest.mark.parametrize(("answer", "left"), [("n\n", 4), ("y\n", 1)])
def test_prune_on_a_terminal_asks(root: Path, answer: str, left: int) -> None:
    code, shown = on_terminal("prune", root, "--keep", "last=1", answer=answer, columns=100)

    assert code == 0
    assert "delete 3 generations" in shown
    assert len(folders(root)) == left


def test_litter_goes_and_generations_stay(cli: Cli, root: Path) -> None:
    crashed = root / "step-0000000007"
    shutil.copytree(root / "step-0000000001", crashed)
    (crashed / "manifest.json").unlink()
    (crashed / "mine.txt").write_text("not a save's")
    stray = root / "step-0000000002" / "rank-00000.0badcafe.safetensors"
    stray.write_bytes(b"half")
    (root / "step-0000000008").mkdir()

    done = cli("prune", root, "--litter", "--dry-run")
    assert f"litter: {stray.parent.name}/{stray.name}" in done.out
    assert stray.exists()

    assert cli("prune", root, "--litter", "--yes").code == 0
    assert not stray.exists()
    assert not (root / "step-0000000008").exists()
    assert [path.name for path in crashed.iterdir()] == ["mine.txt"]
    assert cli("verify", root, "--all").code == 0
    assert "there is no litter" in cli("prune", root, "--litter").err


def test_litter_of_a_run_that_is_being_written_is_none(cli: Cli, root: Path) -> None:
    stray = root / "step-0000000002" / "rank-00000.0badcafe.safetensors"
    stray.write_bytes(b"half")
    listener = listen(str(root), 0)
    assert listener is not None
    with listener:
        done = cli("prune", root, "--litter", "--yes")

    assert done.code == 2
    assert "is writing" in done.err
    assert stray.exists()


def test_litter_of_an_archive_and_a_cache_that_a_writer_fills_is_none(
    cli: Cli, tmp_path: Path
) -> None:
    archive, cache = tmp_path / "archive", tmp_path / "cache"
    left = "step-0000000009/rank-00000.0badcafe.safetensors"
    strays = [archive / left, cache / left]
    with Checkpointer(tmp_path / "run", archive=str(archive), cache=str(cache)) as checkpointer:
        checkpointer.save({"x": torch.ones(3)}, 1).wait("archived")
        for stray in strays:
            stray.parent.mkdir()
            stray.write_bytes(b"half")
            done = cli("prune", stray.parent.parent, "--litter", "--yes")
            assert done.code == 2
            assert "is writing" in done.err
            assert stray.exists()
    for stray in strays:
        assert cli("prune", stray.parent.parent, "--litter", "--yes").code == 0
        assert not stray.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --keep RULES"),
        (("--keep", "lst=3"), "'lst' is no retention rule"),
        (("--keep", "last=0"), "must be a whole number from 1 up"),
    ],
)
def test_a_rule_that_is_none_is_refused(
    cli: Cli, root: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = cli("prune", root, *arguments)
    assert done.code == 2
    assert message in done.err


def test_prune_wants_the_run_and_not_one_generation(cli: Cli, root: Path) -> None:
    done = cli("prune", root / "step-0000000001", "--keep", "last=1", "--yes")
    assert done.code == 2
    assert "give the run's folder" in done.err


def test_a_permanent_generation_survives_until_it_is_untagged(cli: Cli, root: Path) -> None:
    assert cli("tag", root, 1, "permanent", "--reason", "the paper").code == 0
    cli("prune", root, "--keep", "last=1", "--yes")
    assert folders(root) == ["epoch=0-step=4.ckpt", "step-0000000001"]

    found = json.loads(cli("untag", root / "step-0000000001", "permanent", "--json").out)
    assert found["tags"] == {}
    cli("prune", root, "--keep", "last=1", "--yes")
    assert folders(root) == ["epoch=0-step=4.ckpt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tag", "{root}", "permanent"), "say which generation"),
        (("tag", "{root}", "9", "permanent"), "no generation of step 9"),
        (("tag", "{root}", "x", "permanent"), "'x' is no step"),
        (("tag", "{root}", "1", "two words"), "is no tag"),
        (("tag", "{root}"), "give ROOT [STEP] TAG"),
        (("untag", "{root}", "1", "permanent"), "has no tag 'permanent'"),
    ],
)
def test_tags_are_never_put_by_guess(
    cli: Cli, root: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = cli(*(argument.format(root=root) for argument in arguments))
    assert done.code == 2
    assert message in done.err


def test_a_misspelt_tag_is_noticed_and_two_names_of_a_step_are_told_apart(
    cli: Cli, root: Path
) -> None:
    assert "is a mark for people only" in cli("tag", root, 1, "permenant").err

    shutil.copytree(root / "step-0000000001", root / "best.ckpt")
    done = cli("tag", root, 1, "permanent")
    assert done.code == 2
    assert str(root / "best.ckpt") in done.err
    assert cli("tag", root / "best.ckpt", "permanent").code == 0
