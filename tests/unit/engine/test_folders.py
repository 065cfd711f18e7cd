"""A run that has not resumed keeps clear of what has to stay in its root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import chains
from tests.chains import assert_same, assert_sound
from tests.faults import FaultyStore
from torch_ckpt import Checkpointer, load_generation
from torch_ckpt.folders import Folders
from torch_ckpt.manifest.commit import update_tags
from torch_ckpt.storage.local import LocalStore

SIZE = 1 << 18


def state_at(step: int) -> dict[str, Any]:
    return {"frozen": torch.arange(float(SIZE)), "w": torch.linspace(-1, 1, SIZE) + step * 1e-4}


@pytest.mark.parametrize("incremental", [True, False])
def test_a_run_that_does_not_resume_takes_no_base_from_what_is_there(
    tmp_path: Path, incremental: bool
) -> None:
    with Checkpointer(tmp_path, incremental=True, keep=None) as saver:
        for step in (1, 2, 3):
            saver.save(state_at(step), step).wait()
    with Checkpointer(tmp_path, incremental=incremental, keep=None) as saver:
        beside = [saver.save(state_at(10 + step), step, block="committed") for step in (1, 2)]
        over = saver.save(state_at(13), 3, block="committed")
    assert all(one.folder != f"step-{one.step:010d}" for one in beside)
    assert over.folder == "step-0000000003", "nothing builds on it"
    for one in (*beside, over):
        assert_same(load_generation(tmp_path, folder=one.folder), state_at(10 + one.step))
    assert_same(load_generation(tmp_path, folder="step-0000000002"), state_at(2))
    assert_sound(tmp_path)


def test_a_run_that_does_not_resume_replaces_nothing_that_was_set_apart(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as saver:
        saver.save(state_at(1), 1).wait()
    update_tags(chains.store_at(tmp_path), "step-0000000001", add={"aside": "went back"})
    with Checkpointer(tmp_path) as saver:
        assert saver.save(state_at(5), 1, block="committed").folder != "step-0000000001"
    assert_same(load_generation(tmp_path, folder="step-0000000001"), state_at(1))


def test_saves_go_beside_until_storage_says_what_is_there(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(str(tmp_path)))
    folders = Folders(store, builds=False)
    store.fail("folders")
    for wanted in ("step-0000000001-00000001", "step-0000000001"):
        folders.look("step-0000000001", lambda found: found, leads=True)
        assert folders.clear("step-0000000001", 1, "00000001") == wanted
    folders.look("step-0000000001", lambda found: found, leads=True)
    assert [name for name, _ in store.calls].count("folders") == 2, "then it is known"


def test_a_folder_of_a_users_name_is_never_looked_for(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(str(tmp_path)))
    folders = Folders(store, builds=True)
    folders.look("best", lambda found: found, leads=True)
    assert folders.clear("best", 1, "00000001") == "best"
    assert store.calls == []
