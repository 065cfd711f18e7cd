"""Generations that build on others: nothing takes a base away, and damage reaches its children."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import chains
from tests.chains import assert_same, assert_sound, copied
from tests.faults import FaultyStore
from tests.unit.cli.conftest import Done
from tests.unit.cli.conftest import cli as cli  # a fixture
from torch_ckpt import Checkpointer, KeepLast, NothingUsable, load_generation
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.choose import choose
from torch_ckpt.generations.copy import copy_generation
from torch_ckpt.generations.prune import base_steps, prune
from torch_ckpt.generations.verify import verify

BIG = 1 << 18
STEPS = range(1, 7)
Cli = Callable[..., Done]


def _state() -> dict[str, Any]:
    return {"frozen": torch.arange(float(BIG)), "w": torch.linspace(-1, 1, BIG)}


def state_at(step: int) -> dict[str, Any]:
    state = _state()
    for _ in range(step):
        state["w"] += 1e-4
    return state


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chains: 1, 2, 3 and 4, 5, 6."""
    root = tmp_path_factory.mktemp("made") / "run"
    state = _state()
    with Checkpointer(root, incremental=True, full_every=2, keep=None) as checkpointer:
        for step in STEPS:
            state["w"] += 1e-4
            checkpointer.save(state, step).wait()
    assert chains.bases(root) == {1: (), 2: (1,), 3: (1, 2), 4: (), 5: (4,), 6: (4, 5)}
    assert "delta" in chains.codecs(root, chains.by_step(root)[3])
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def spoil(root: Path, step: int, offset: int = -1) -> Path:
    """Flip a bit in the shard of a step."""
    (shard,) = [path for path in folder(root, step).iterdir() if path.suffix != ".json"]
    data = bytearray(shard.read_bytes())
    data[offset] ^= 1
    shard.write_bytes(data)
    return shard


def folder(root: Path, step: int) -> Path:
    return root / f"step-{step:010d}"


def resumed(root: Path) -> tuple[int | None, dict[str, Any]]:
    state = _state()
    with Checkpointer(root, incremental=True, keep=None) as checkpointer:
        found = checkpointer.resume(state)
    return None if found is None else found.step, state


def test_prune_keeps_what_kept_ones_build_on_and_says_so(root: Path) -> None:
    verdicts = prune(Catalog(chains.store_at(root)), KeepLast(1), run=None)
    assert {v.generation.step: v.reason for v in verdicts} == {
        6: "the newest",
        5: "step 6 needs it as a base",
        4: "step 6 needs it as a base",
        3: "no rule keeps it",
        2: "no rule keeps it",
        1: "no rule keeps it",
    }
    assert sorted(chains.by_step(root)) == [4, 5, 6]
    assert_sound(root)
    assert_same(load_generation(root), state_at(6))


def test_a_permanent_child_keeps_its_whole_chain(root: Path, cli: Cli) -> None:
    assert cli("tag", root, "3", "permanent").code == 0
    prune(Catalog(chains.store_at(root)), KeepLast(1), run=None)
    assert sorted(chains.by_step(root)) == [1, 2, 3, 4, 5, 6]
    assert_sound(root)


def test_a_prune_that_ends_anywhere_leaves_no_child_without_its_base(
    made: Path, tmp_path: Path
) -> None:
    cut = 0
    while True:
        cut += 1
        root = Path(shutil.copytree(made, tmp_path / str(cut)))
        faulty = FaultyStore(chains.store_at(root))
        faulty.fail("delete", nth=cut, error=KeyboardInterrupt("killed"))  # type: ignore[arg-type]
        try:
            prune(Catalog(faulty), KeepLast(1), run=None)
        except KeyboardInterrupt:
            pass
        else:
            break
        left = chains.by_step(root)
        needed = base_steps(list(left.values()), list(left.values()))
        assert left.keys() >= needed.keys(), (cut, left.keys())
        assert_sound(root)
        prune(Catalog(chains.store_at(root)), KeepLast(1), run=None)
        assert sorted(chains.by_step(root)) == [4, 5, 6]
    assert cut > 6


def test_damage_of_a_base_costs_exactly_its_children(root: Path) -> None:
    shard = spoil(root, 4, offset=-100)
    store = chains.store_at(root)
    reports = {step: verify(store, one) for step, one in chains.by_step(root).items()}
    assert {step for step, report in reports.items() if not report.ok} == {4, 5, 6}
    for step in (5, 6):
        (damage, *_) = reports[step].damages
        assert damage.file == f"step-0000000004/{shard.name}"
        assert damage.tensors
        assert "SHA-256" in damage.reason
    step, state = resumed(root)
    assert step == 3
    assert_same(state, state_at(3))
    tags = {step: one.tags for step, one in chains.by_step(root).items()}
    assert "damaged" in tags[6]
    assert shard.name in tags[6]["damaged"]
    assert resumed(root)[0] == 3  # without a look at the others again


def test_a_quarantined_or_lost_base_makes_its_children_unusable_at_once(root: Path) -> None:
    everything = list(chains.by_step(root).values())
    assert [one.step for one in choose(everything)] == [6, 5, 4, 3, 2, 1]
    assert [one.step for one in choose([o for o in everything if o.step != 4])] == [3, 2, 1]
    shutil.rmtree(folder(root, 4))
    step, state = resumed(root)
    assert step == 3
    assert_same(state, state_at(3))
    store = chains.store_at(root)
    for child in (5, 6):
        damages = verify(store, chains.by_step(root)[child]).damages
        assert {one.reason for one in damages} == {"step 4, on which it builds, is gone"}


def test_a_base_whose_manifest_is_gone_is_gone(root: Path) -> None:
    (folder(root, 4) / "manifest.json").unlink()
    damages = verify(chains.store_at(root), chains.by_step(root)[6]).damages
    assert {one.reason for one in damages} == {"step 4, on which it builds, is gone"}
    assert resumed(root)[0] == 3


def test_a_base_of_another_attempt_is_no_base(root: Path, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "other", keep=None) as checkpointer:
        checkpointer.save(state_at(4), 4).wait()
    shutil.rmtree(folder(root, 4))
    shutil.copytree(folder(tmp_path / "other", 4), folder(root, 4))
    report = verify(chains.store_at(root), chains.by_step(root)[6])
    assert {one.reason for one in report.damages} == {"step 4, on which it builds, is gone"}
    step, state = resumed(root)
    assert step == 4
    assert_same(state, state_at(4))
    assert "damaged" in chains.by_step(root)[6].tags


def test_when_all_is_lost_with_a_base_that_is_said(root: Path) -> None:
    shutil.rmtree(folder(root, 1))
    shutil.rmtree(folder(root, 4))
    with Checkpointer(root) as checkpointer, pytest.raises(NothingUsable) as caught:
        checkpointer.resume(_state())
    text = str(caught.value)
    assert "step-0000000006 (it builds on step 4, which is gone)" in text, text


def test_a_base_that_a_user_removes_goes_after_its_children(tmp_path: Path) -> None:
    state = _state()
    with Checkpointer(tmp_path, incremental=True, full_every=2, keep=KeepLast(1)) as checkpointer:
        for step in STEPS:
            state["w"] += 1e-4
            checkpointer.save(state, step).wait()
            if step == 2:
                checkpointer.remove("step-0000000001")
            if step == 3:
                assert_same(load_generation(tmp_path), state)
                assert sorted(chains.by_step(tmp_path)) == [1, 2, 3]
    assert sorted(chains.by_step(tmp_path)) == [4, 5, 6]
    assert_sound(tmp_path)


def test_a_copy_of_a_child_brings_its_bases_first(root: Path, tmp_path: Path) -> None:
    target = FaultyStore(chains.store_at(tmp_path / "copy"))
    copied_ = copy_generation(chains.store_at(root), target, chains.by_step(root)[6])
    assert copied_.files == 6
    manifests = [name for call, name in target.calls if call == "put" and "manifest" in name]
    assert [name[:15] for name in manifests] == [f"step-000000000{n}" for n in (4, 5, 6)]
    assert_sound(tmp_path / "copy")
    assert_same(load_generation(tmp_path / "copy"), state_at(6))
    again = copy_generation(chains.store_at(root), target, chains.by_step(root)[6])
    assert again.files == 0


def test_commands_follow_chains(root: Path, cli: Cli, tmp_path: Path) -> None:
    for line in (
        ("ls", root),
        ("show", root, "6"),
        ("verify", root, "--all"),
        ("diff", root / "step-0000000006", root / "step-0000000006"),
        ("export", root / "step-0000000006", tmp_path / "out", "--to", "safetensors"),
        ("prefetch", root, "--to", tmp_path / "near"),
    ):
        done = cli(*line)
        assert done.code == 0, (line, done)
    assert_same(load_generation(tmp_path / "near"), state_at(6))
    assert cli("diff", root / "step-0000000005", root / "step-0000000006").code == 1
    done = cli("prune", root, "--keep", "last=1", "--dry-run")
    assert "step 6 needs it as a base" in done.out
    spoil(root, 4, offset=-100)
    done = cli("verify", root, "6")
    assert done.code == 1
    assert "step-0000000004/" in done.out


def test_a_saved_state_is_not_the_state_of_a_neighbour(root: Path) -> None:
    for step in STEPS:
        assert_same(load_generation(root, step), copied(state_at(step)))
