"""Encoded and incremental saves: every bit comes back, and little is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests import chains
from tests.chains import assert_same, assert_sound, copied
from torch_ckpt import Checkpointer, KeepLast, load_generation
from torch_ckpt.generations.verify import verify
from torch_ckpt.manifest.dtypes import DTYPES

Codec = Literal["raw", "zstd", "auto"]
BIG = 1 << 18
"""Elements of a float tensor that has blocks of its own."""
ENCODINGS: list[tuple[Codec, bool]] = [
    ("raw", True),
    ("zstd", False),
    ("zstd", True),
    ("auto", False),
    ("auto", True),
]


def of_every_type(seed: int) -> dict[str, torch.Tensor]:
    """Random bits in every element type, NaNs with payloads among them, and odd lengths."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for number, name in enumerate(DTYPES):
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue  # this torch has no such type
        if dtype == torch.bool:
            state[name] = torch.randint(0, 2, (1001,), generator=generator).bool()
            continue
        count = (997 + 2 * number) * DTYPES[name].itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        state[name] = raw.view(dtype)
    return state


@pytest.mark.parametrize(("codec", "incremental"), ENCODINGS)
def test_every_type_comes_back_bit_for_bit(tmp_path: Path, codec: Codec, incremental: bool) -> None:
    wanted = {}
    state = of_every_type(0)
    with Checkpointer(tmp_path, codec=codec, incremental=incremental, keep=None) as checkpointer:
        for step in range(1, 5):
            changed = of_every_type(step)
            for number, name in enumerate(state):
                if number % 4 == step % 4:  # most stay as they are
                    state[name] = changed[name]
            wanted[step] = copied(state)
            checkpointer.save(state, step)
    for step, tensors in wanted.items():
        assert_same(load_generation(tmp_path, step), tensors)
    assert_sound(tmp_path)


@pytest.mark.parametrize(("codec", "incremental"), ENCODINGS)
def test_training_states_come_back_bit_for_bit(
    tmp_path: Path, codec: Codec, incremental: bool
) -> None:
    state: dict[str, Any] = {
        "w": torch.randn(BIG),
        "half": torch.randn(BIG).bfloat16(),
        "large": torch.randn(3 << 20),  # more than one block
        "counts": torch.zeros(100, dtype=torch.int64),
        "tail": torch.ones(5, dtype=torch.uint8),
    }
    wanted = {}
    with Checkpointer(tmp_path, codec=codec, incremental=incremental, keep=None) as checkpointer:
        for step in range(1, 5):
            state["w"] += 1e-4
            state["half"] += torch.randn(BIG).bfloat16() * 1e-3
            state["large"][step * 1000 : step * 1001] += 1.0
            state["counts"] += 1
            wanted[step] = copied(state)
            checkpointer.save(state, step).wait()
    for step, tensors in wanted.items():
        assert_same(load_generation(tmp_path, step), tensors)
    assert_sound(tmp_path)
    if codec == "auto":
        return  # what pays is measured, and may be another thing on a busy machine
    chain = chains.bases(tmp_path)
    assert chain[4] == ((1, 2, 3) if incremental else ())
    if incremental:
        assert "delta" in chains.codecs(tmp_path, chains.by_step(tmp_path)[4])


@pytest.mark.parametrize("state", [{}, {"none": torch.zeros(0, 3)}, {"few": torch.ones(3).bool()}])
@pytest.mark.parametrize(("codec", "incremental"), ENCODINGS)
def test_states_of_no_or_few_bytes_are_saved(
    tmp_path: Path, state: dict[str, Any], codec: Codec, incremental: bool
) -> None:
    with Checkpointer(tmp_path, codec=codec, incremental=incremental) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state, step).wait()
    assert_same(load_generation(tmp_path), state)
    assert_sound(tmp_path)


@pytest.mark.parametrize("codec", ["zstd", "auto"])
def test_identical_blocks_that_no_codec_makes_smaller_are_stored_once(
    tmp_path: Path, codec: Codec
) -> None:
    noise = torch.randint(0, 256, (2 << 20,), dtype=torch.uint8)
    state = {"a": noise, "b": noise.clone(), "tied": noise}
    with Checkpointer(tmp_path, codec=codec) as checkpointer:
        checkpointer.save(state, 1).wait()
    assert_same(load_generation(tmp_path), state)
    assert chains.by_step(tmp_path)[1].manifest.bytes < 2.1 * (1 << 20)
    assert_sound(tmp_path)


def test_identical_tensors_are_stored_once_along_a_chain(tmp_path: Path) -> None:
    weight = torch.randn(BIG)
    state = {"model": weight, "average": weight.clone()}
    wanted = {}
    with Checkpointer(tmp_path, codec="zstd", incremental=True, keep=None) as checkpointer:
        for step in (1, 2, 3):
            wanted[step] = copied(state)
            checkpointer.save(state, step).wait()
            if step == 1:
                for tensor in state.values():
                    tensor += 1e-4  # both alike
            else:
                state["average"].mul_(0.5)
    for step, tensors in wanted.items():
        assert_same(load_generation(tmp_path, step), tensors)
    found = chains.part(tmp_path, chains.by_step(tmp_path)[2])
    assert found.blocks[0] == found.blocks[1]
    assert_sound(tmp_path)


def test_a_frozen_backbone_is_stored_once(tmp_path: Path) -> None:
    state = {"backbone": torch.randn(4 << 20), "adapter": torch.randn(1000)}
    with Checkpointer(tmp_path, incremental=True, keep=KeepLast(2)) as checkpointer:
        for step in range(1, 6):
            state["adapter"] += 1
            checkpointer.save(state, step).wait()
    found = chains.by_step(tmp_path)
    assert found[1].manifest.bytes > (16 << 20)
    assert all(found[step].manifest.bytes < (16 << 20) / 1000 for step in (4, 5))
    # What step 5 does not name is not pinned by it: adapters of 2 and 3 may be gone.
    assert found[5].manifest.bases[0] == 1
    assert_same(load_generation(tmp_path), state)


@pytest.mark.parametrize("full_every", [1, 2])
def test_no_chain_is_longer_than_asked(tmp_path: Path, full_every: int) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None, full_every=full_every) as checkpointer:
        for step in range(1, 8):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait()
    lengths = [len(one) for one in chains.bases(tmp_path).values()]
    assert lengths == [n % (full_every + 1) for n in range(7)]


def test_a_state_of_another_layout_stands_alone(tmp_path: Path) -> None:
    kept = torch.randn(BIG)
    states: list[dict[str, Any]] = [
        {"kept": kept},
        {"kept": kept, "new": torch.randn(100)},
        {"kept": kept, "new": torch.randn(200)},
        {"kept": kept, "new": torch.randn(200).double()},
        {"kept": kept.reshape(2, -1), "new": torch.randn(200).double()},
        {"kept": kept, "renamed": torch.randn(200).double(), "huge": torch.randn(4 << 20)},
        {"kept": kept},
    ]
    with Checkpointer(tmp_path, codec="zstd", incremental=True, keep=None) as checkpointer:
        for step, state in enumerate(states, 1):
            checkpointer.save(state, step)
            checkpointer.save(state, step + 100).wait()  # builds on it, if it may
    for step, state in enumerate(states, 1):
        assert_same(load_generation(tmp_path, step), state)
        assert_same(load_generation(tmp_path, step + 100), state)
    assert all(chain == () for step, chain in chains.bases(tmp_path).items() if step < 100)


def test_objects_of_every_save_are_its_own(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(BIG), "epoch": 0, "note": ["a"]}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save({**state, "epoch": step, "note": ["b"] * step}, step).wait()
    for step in (1, 2, 3):
        found = load_generation(tmp_path, step)
        assert (found["epoch"], found["note"]) == (step, ["b"] * step)


def test_a_second_name_of_a_child_shares_its_bytes_and_its_bases(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    second = copied(state)
    with Checkpointer(tmp_path, incremental=True, keep=KeepLast(3)) as checkpointer:
        for step in (1, 2, 3, 4):
            state["w"] += 1e-5
            checkpointer.save(state, step, folder=f"step-{step:010d}").wait()
            if step == 2:
                checkpointer.save(state, step, folder="best").wait()
                second = copied(state)
    assert_same(load_generation(tmp_path, folder="best"), second)
    assert_same(load_generation(tmp_path), state)
    store = chains.store_at(tmp_path)
    links = [path for path in tmp_path.glob("best/*.blocks") if path.stat().st_nlink > 1]
    assert len(links) == 1
    for one in chains.Catalog(store).committed():
        assert verify(store, one).ok
    assert next(o for o in chains.Catalog(store).committed() if o.folder == "best").step == 2


def test_a_folder_of_the_users_own_name_builds_on_others_and_is_no_base(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    wanted = {}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        for step, folder in enumerate(["last", None, "last", None, None, "other"], 1):
            wanted[step] = copied(state)
            checkpointer.save(state, step, folder=folder).wait()
            state["w"] += 1e-5
    assert chains.bases(tmp_path) == {2: (), 3: (2,), 4: (2,), 5: (2, 4), 6: (2, 4, 5)}
    for step in (2, 3, 4, 5, 6):
        assert_same(load_generation(tmp_path, step), wanted[step])


def test_a_save_elsewhere_neither_builds_nor_is_built_on(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path / "run", incremental=True, keep=None) as checkpointer:
        for step, folder in enumerate([None, str(tmp_path / "other" / "step-0000000002"), None], 1):
            checkpointer.save(state, step, folder=folder).wait()
    assert chains.bases(tmp_path / "run") == {1: (), 3: (1,)}
    assert chains.bases(tmp_path / "other") == {2: ()}


def test_sync_saves_build_on_one_another(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None, mode="sync") as checkpointer:
        for step in (1, 2, 3):
            state["w"] += 1e-5
            assert checkpointer.save(state, step).state == "committed"
    assert chains.bases(tmp_path)[3] == (1, 2)
    assert_same(load_generation(tmp_path), state)
