"""What is kept for ever under `incremental=True` keeps no chain with it, unless tagged later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests import chains
from tests.chains import assert_same, assert_sound, copied
from torch_ckpt import Checkpointer, KeepLast, load_generation
from torch_ckpt.generations.prune import prune
from torch_ckpt.manifest.commit import update_tags

SIZE = 1 << 18


def state_at(step: int) -> dict[str, Any]:
    return {"frozen": torch.arange(float(SIZE)), "w": torch.linspace(-1, 1, SIZE) + step * 1e-4}


def test_a_permanent_save_lets_the_chain_before_it_go(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, incremental=True, full_every=3, keep=KeepLast(1)) as saver:
        for step in range(1, 8):
            tags = ["permanent"] if step == 3 else []
            saver.save(state_at(step), step, tags=tags).wait()
            if step == 5:
                assert chains.bases(tmp_path) == {3: (), 4: (3,), 5: (3, 4)}
    assert chains.bases(tmp_path) == {3: (), 7: ()}
    for step in (3, 7):
        assert_same(load_generation(tmp_path, step), state_at(step))
    assert_sound(tmp_path)


def test_a_second_name_that_is_permanent_has_bytes_of_its_own(tmp_path: Path) -> None:
    state = state_at(0)
    with Checkpointer(tmp_path, incremental=True, full_every=3, keep=KeepLast(1)) as saver:
        saver.save(state, 1).wait()
        state["w"] += 1e-5
        saver.save(state, 2, folder="step-0000000002").wait()
        saver.save(state, 2, folder="best", tags=["permanent"]).wait()
        best = copied(state)
        for step in (3, 4, 5):
            state["w"] += 1e-5
            saver.save(state, step).wait()
    assert chains.bases(tmp_path) == {2: (), 5: ()}
    assert_same(load_generation(tmp_path, folder="best"), best)
    assert_sound(tmp_path)


def test_multiples_of_permanent_every_let_their_chains_go_in_the_archive(tmp_path: Path) -> None:
    with Checkpointer(
        tmp_path / "run",
        archive=tmp_path / "archive",
        incremental=True,
        full_every=8,
        keep=KeepLast(1),
        keep_archive=KeepLast(1),
        permanent_every=3,
    ) as saver:
        for step in range(1, 8):
            saver.save(state_at(step), step).wait("archived", 60)
    assert chains.bases(tmp_path / "archive") == {3: (), 6: (), 7: (6,)}
    assert_same(load_generation(tmp_path / "archive", 3), state_at(3))
    assert_sound(tmp_path / "archive")


def test_what_is_tagged_permanent_later_keeps_its_chain(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, incremental=True, keep=None) as saver:
        for step in (1, 2, 3):
            saver.save(state_at(step), step).wait()
    store = chains.store_at(tmp_path)
    update_tags(store, "step-0000000002", add={"permanent": "of the paper"})
    with Checkpointer(tmp_path, incremental=True, keep=KeepLast(1)) as saver:
        assert saver.resume(state_at(0)) is not None
        saver.save(state_at(4), 4).wait()
    assert chains.bases(tmp_path) == {1: (), 2: (1,), 4: ()}
    verdicts = prune(chains.Catalog(store), KeepLast(1), run=None, dry_run=True)
    assert {one.generation.step: one.reason for one in verdicts}[1] == "step 2 needs it as a base"
