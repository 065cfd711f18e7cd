"""With an archive and a cache beside ROOT, commands see one run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli, flip, on_terminal, shard_in
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.copy import copy_generation
from torch_ckpt.storage.local import LocalStore

GB = 10**9


@pytest.fixture
def archive(root: Path, tmp_path: Path) -> Path:
    """Steps 1 to 3 are archived, step 4 is not."""
    made = tmp_path / "archive"
    for step in (1, 2, 3):
        copy(root, made, step)
    return made


@pytest.fixture
def cache(root: Path, tmp_path: Path) -> Path:
    """Step 3 is in the cache."""
    made = tmp_path / "cache"
    copy(root, made, 3)
    return made


def copy(source: Path, target: Path, step: int) -> None:
    store = LocalStore(str(source))
    copy_generation(store, LocalStore(str(target)), Catalog(store).find(step=step))


def steps(root: Path) -> list[int]:
    return [one.step for one in Catalog(LocalStore(str(root))).committed()]


def test_ls_shows_which_tiers_hold_what_and_what_is_not_archived(
    cli: Cli, root: Path, archive: Path, cache: Path
) -> None:
    shutil.rmtree(root / "step-0000000001")
    begun = archive / "epoch=0-step=4.ckpt"
    begun.mkdir()
    shutil.copy(shard_in(root / "epoch=0-step=4.ckpt"), begun)
    arguments = ("ls", root, "--archive", archive, "--cache", cache)

    done = cli(*arguments)

    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0][-1] == "tiers"
    assert [line[-1] for line in lines[1:]] == [
        "primary",
        "cache,primary,archive",
        "primary,archive",
        "archive",
        "archive",
    ]
    assert "unfinished" in lines[-1]
    assert "not archived: 1 generation (" in done.err
    assert "the oldest of step 4" in done.err
    found = json.loads(cli(*arguments, "--json").out)
    assert found["not_archived"] == ["epoch=0-step=4.ckpt"]
    assert found["unreachable"] == {}
    assert [one["tiers"] for one in found["generations"]][1] == ["cache", "primary", "archive"]
    assert "tiers" not in cli("ls", root).out


def test_commands_take_a_generation_from_the_first_tier_that_has_it(
    cli: Cli, root: Path, archive: Path, cache: Path, tmp_path: Path
) -> None:
    shutil.rmtree(root / "step-0000000001")
    tiers = ("--archive", archive, "--cache", cache)

    def shown(step: int) -> str:
        return json.loads(cli("show", root, step, *tiers, "--json").out)["root"]

    assert [shown(step) for step in (4, 3, 2, 1)] == [
        str(root),
        str(cache),
        str(root),
        str(archive),
    ]
    out = tmp_path / "out.safetensors"
    assert cli("export", root, 1, "--to", "safetensors", out, *tiers).code == 0
    assert cli("diff", f"{root}@1", f"{archive}@1", *tiers).code == 0
    done = cli("show", root, 9, *tiers)
    assert done.code == 2
    assert "there is step 4, 3, 2, 1" in done.err


def test_a_cache_that_lacks_shards_of_other_nodes_is_passed_over(
    cli: Cli, root: Path, archive: Path, cache: Path
) -> None:
    shard_in(cache / "step-0000000003").unlink()
    tiers = ("--archive", archive, "--cache", cache)
    assert json.loads(cli("show", root, 3, *tiers, "--json").out)["root"] == str(root)
    assert cli("verify", root, 3, *tiers).code == 0
    assert cli("diff", f"{root}@3", f"{archive}@3", *tiers).code == 0


def test_a_lost_root_is_read_from_the_archive(cli: Cli, root: Path, archive: Path) -> None:
    shutil.rmtree(root)
    assert cli("show", root).code == 2
    found = json.loads(cli("show", root, "--archive", archive, "--json").out)
    assert (found["step"], found["root"]) == (3, str(archive))


def test_verify_looks_at_every_tier_and_says_which(
    cli: Cli, root: Path, archive: Path, cache: Path
) -> None:
    shard = shard_in(archive / "step-0000000003")
    flip(shard)
    tiers = ("--archive", archive, "--cache", cache)

    done = cli("verify", root, 3, *tiers)

    assert done.code == 1
    assert f"archive: step-0000000003/{shard.name} at byte" in done.out
    assert "cache: step-0000000003: sound" in done.out
    assert "primary: step-0000000003: sound" in done.out
    assert done.err == "torch-ckpt: 1 of 3 copies damaged\n"
    found = json.loads(cli("verify", root, "--all", *tiers, "--json").out)
    assert len(found["generations"]) == 4 + 3 + 1
    assert [one["tier"] for one in found["generations"] if not one["ok"]] == ["archive"]
    (root / "step-0000000002" / "manifest.json").write_text("{")
    done = cli("verify", root, *tiers)
    assert "primary: step-0000000002/manifest.json" in done.out


def test_tags_are_changed_in_every_tier(cli: Cli, root: Path, archive: Path, cache: Path) -> None:
    tiers = ("--archive", archive, "--cache", cache)
    done = cli("tag", root, 3, "permanent", "--reason", "paper", *tiers)
    assert done.out == "step-0000000003 is never pruned (cache, primary, archive)\n"
    for place in (root, archive, cache):
        assert Catalog(LocalStore(str(place))).find(step=3).tags == {"permanent": "paper"}
    found = json.loads(cli("untag", root, 3, "permanent", *tiers, "--json").out)
    assert found["tiers"] == ["cache", "primary", "archive"]
    for place in (root, archive, cache):
        assert Catalog(LocalStore(str(place))).find(step=3).tags == {}
    shutil.rmtree(root / "step-0000000001")
    assert cli("tag", root / "step-0000000001", "permanent", *tiers).code == 0
    assert Catalog(LocalStore(str(archive))).find(step=1).tags == {"permanent": ""}


def test_nothing_leaves_root_before_the_archive_has_it_whole(
    cli: Cli, root: Path, archive: Path
) -> None:
    cli("untag", root, 4, "permanent")
    shard_in(archive / "step-0000000002").unlink()
    arguments = ("prune", root, "--archive", archive, "--keep", "last=1")

    verdicts = json.loads(cli(*arguments, "--dry-run", "--json").out)["verdicts"]

    primary = {one["step"]: one for one in verdicts if one["tier"] == "primary"}
    assert {step: one["kept"] for step, one in primary.items()} == {
        4: True,
        3: False,
        2: True,
        1: False,
    }
    assert "not archived: rank-00000" in primary[2]["reason"]
    assert primary[3]["reason"] == "no rule keeps it, and the archive has it"
    assert all(one["kept"] for one in verdicts if one["tier"] == "archive")
    assert cli(*arguments, "--yes").out.endswith(")\n")
    assert steps(root) == [4, 2]
    assert steps(archive) == [3, 2, 1]


def test_what_the_archive_does_not_want_may_leave_root_unarchived(
    cli: Cli, root: Path, archive: Path
) -> None:
    cli("untag", root, 4, "permanent")
    shutil.rmtree(archive / "step-0000000003")
    arguments = ("prune", root, "--archive", archive, "--keep", "last=1")
    arguments += ("--keep-archive", "every=2")

    verdicts = json.loads(cli(*arguments, "--dry-run", "--json").out)["verdicts"]

    reasons = {(one["tier"], one["step"]): one["reason"] for one in verdicts}
    assert reasons["primary", 3] == "no rule keeps it, that of the archive does not want it"
    assert reasons["archive", 2] == "a multiple of 2"
    assert cli(*arguments, "--yes").code == 0
    assert steps(root) == [4]
    assert steps(archive) == [2]


def test_the_archives_rule_counts_what_has_yet_to_arrive(
    cli: Cli, root: Path, archive: Path
) -> None:
    arguments = ("prune", root, "--archive", archive, "--keep-archive", "last=2", "--yes")
    assert cli(*arguments).code == 0
    assert steps(archive) == [3]  # 4 is the other one
    assert steps(root) == [4, 3, 2, 1]
    arguments = ("prune", root, "--archive", archive, "--keep-archive", "last=1", "--yes")
    assert cli(*arguments).code == 0
    assert steps(archive) == [3]  # the newest that is there


def test_prices_are_those_of_what_stays(cli: Cli, root: Path, archive: Path) -> None:
    arguments = ("prune", root, "--archive", archive, "--dry-run", "--json")
    rules = ("--keep", "last=1", "--keep-archive", "last=3")

    found = json.loads(cli(*arguments, *rules, "--cost", "primary=0.14", "--cost", "23e3").out)

    assert found["cost"].keys() == {"primary", "archive"}
    kept = [one for one in found["verdicts"] if one["kept"] and one["tier"] == "archive"]
    facts = found["cost"]["archive"]
    assert facts["generations"] == len(kept) == 2
    assert facts["bytes"] == sum(one["bytes"] for one in kept)
    assert facts["dollars_a_month"] == pytest.approx(facts["bytes"] / GB * 23_000)
    found = json.loads(cli(*arguments, "--cost", "0.023").out)
    assert (found["deleted"], found["cost"]["archive"]["generations"]) == (False, 3)
    done = cli("prune", root, "--cost", "2000", "--keep", "last=2", "--dry-run")
    assert "primary: 2 generations, " in done.out
    assert "a month" in done.out
    assert "in all: $" in cli(*arguments[:-1], "--cost", "primary=1e3,archive=1").out
    for wrong in ("x", "lustre=1", "-1", "nan", "primary="):
        assert cli("prune", root, "--cost", wrong, "--dry-run").code == 2


def test_a_tier_that_does_not_answer_is_named_and_nothing_is_deleted(cli: Cli, root: Path) -> None:
    silent = "http://127.0.0.1:9/run"  # nobody listens there

    done = cli("ls", root, "--archive", silent)
    assert done.code == 0
    assert "the archive does not answer" in done.err
    assert len(done.out.splitlines()) == 5
    found = json.loads(cli("ls", root, "--archive", silent, "--json").out)
    assert found["not_archived"] is None
    assert found["unreachable"].keys() == {"archive"}
    assert cli("show", root, "--archive", silent).code == 0
    for arguments in (
        ("prune", root, "--keep", "last=1", "--yes"),
        ("tag", root, 1, "permanent"),
    ):
        done = cli(*arguments, "--archive", silent)
        assert done.code == 2, arguments
        assert "archive does not answer" in done.err
    assert steps(root) == [4, 3, 2, 1]
    assert Catalog(LocalStore(str(root))).find(step=1).tags == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "{root}", "--archive", "{root}"), "must be different places"),
        (("ls", "{root}", "--archive", "{root}/step-0000000001"), "is one generation"),
        (("ls", "{root}", "--archive-option", "a=b"), "give --archive URL"),
        (("prune", "{root}", "--keep-archive", "last=1"), "give --archive URL"),
        (("prefetch", "{root}"), "give --to PATH"),
        (("prefetch", "{root}", "--to", "s3://bucket/x"), "is a folder of this machine"),
        (("prefetch", "{root}", "--to", "{root}"), "is ROOT or the archive itself"),
        (("prefetch", "{root}", "--to", "{root}/LATEST"), "is a file"),
        (("prefetch", "{root}", "--step", "9", "--to", "{root}2"), "no generation of step 9"),
    ],
)
def test_places_that_cannot_be_are_one_line(
    cli: Cli, root: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = cli(*(argument.format(root=root) for argument in arguments))
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


def test_prefetch_fills_a_cache_with_the_newest_usable_generation(
    cli: Cli, root: Path, archive: Path, tmp_path: Path
) -> None:
    to = tmp_path / "nvme"
    cli("tag", root, 4, "damaged")

    done = cli("prefetch", root, "--archive", archive, "--to", to)

    assert done.code == 0
    assert done.out.startswith(f"step 3 of {root} -> {to} (2 files, ")
    assert done.out.count("\n") == 1
    assert steps(to) == [3]
    assert cli("verify", to).code == 0
    again = json.loads(cli("prefetch", root, "--cache", to, "--json").out)
    assert (again["step"], again["files_copied"], again["bytes_copied"]) == (3, 0, 0)
    assert json.loads(cli("prefetch", archive, "--to", to, "--step", 1, "--json").out)["step"] == 1
    assert steps(to) == [3, 1]


def test_prefetch_goes_on_where_it_was_stopped(cli: Cli, root: Path, tmp_path: Path) -> None:
    to = tmp_path / "nvme"
    assert cli("prefetch", root, "--to", to).code == 0
    (to / "epoch=0-step=4.ckpt" / "manifest.json").unlink()
    done = cli("prefetch", root, "--to", to)
    assert "(0 files, 0B; " in done.out
    assert steps(to) == [4]


def test_prefetch_steps_back_from_damage_and_replaces_a_damaged_copy(
    cli: Cli, root: Path, archive: Path, tmp_path: Path
) -> None:
    to = tmp_path / "nvme"
    flip(shard_in(root / "epoch=0-step=4.ckpt"))
    flip(shard_in(root / "step-0000000003"))

    done = cli("prefetch", root, "--archive", archive, "--to", to)

    assert done.code == 0
    assert done.out.startswith(f"step 3 of {archive}")
    assert done.err.count("is damaged, the next one is tried") == 2
    done = cli("prefetch", root, "--to", to, "--step", 4)
    assert done.code == 1
    assert steps(to) == [3]
    flip(shard_in(to / "step-0000000003"))
    cli("tag", to, 3, "damaged")
    assert cli("prefetch", archive, "--to", to, "--step", 3).code == 0
    assert cli("verify", to, 3).code == 0
    assert Catalog(LocalStore(str(to))).find(step=3).tags == {}


def test_prefetch_shows_how_far_it_is_on_a_terminal(root: Path, tmp_path: Path) -> None:
    code, shown = on_terminal("prefetch", root, "--to", tmp_path / "nvme", columns=100)
    assert code == 0
    assert "step 4 of" in shown
