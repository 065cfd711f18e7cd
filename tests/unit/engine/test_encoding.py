"""Encoded and incremental saves: every bit comes back, little is stored, slabs are given back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests import chains
from torch_ckpt import Checkpointer, KeepLast, SaveFailed, SnapshotTorn, WriterDied, load_generation
from torch_ckpt.generations.verify import verify
from torch_ckpt.manifest.commit import update_tags
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


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, also of a type that compares with nothing."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if isinstance(tensor, torch.Tensor):
            assert found[name].dtype == tensor.dtype, name
            assert found[name].shape == tensor.shape, name
            assert bits(found[name]) == bits(tensor), name
        else:
            assert found[name] == tensor, name


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def assert_sound(root: Path) -> None:
    store = chains.store_at(root)
    for one in chains.by_step(root).values():
        report = verify(store, one)
        assert report.ok, report.damages


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
    with Checkpointer(tmp_path, incremental=True, keep=KeepLast(1)) as checkpointer:
        for step in (1, 2, 3, 4):
            state["w"] += 1e-5
            checkpointer.save(state, step, folder=f"step-{step:010d}").wait()
            if step == 2:
                checkpointer.save(state, step, folder="best", tags=["permanent"]).wait()
                second = copied(state)
    assert_same(load_generation(tmp_path, folder="best"), second)
    assert_same(load_generation(tmp_path), state)
    store = chains.store_at(tmp_path)
    links = [path for path in tmp_path.glob("best/*.blocks") if path.stat().st_nlink > 1]
    assert len(links) == 1
    for one in chains.Catalog(store).committed():
        assert verify(store, one).ok
    assert next(o for o in chains.Catalog(store).committed() if o.folder == "best").step == 2


def test_a_folder_of_the_users_own_name_is_no_base(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    wanted = {}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        for step, folder in enumerate(["last", None, "last", None, None, "other"], 1):
            wanted[step] = copied(state)
            checkpointer.save(state, step, folder=folder).wait()
            state["w"] += 1e-5
    assert chains.bases(tmp_path) == {2: (), 3: (2,), 4: (), 5: (4,), 6: (4, 5)}
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


def test_a_held_slab_alone_skips_no_save(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None, on_busy="skip") as checkpointer:
        for step in (1, 2, 3):
            pending = checkpointer.save(state, step)
            assert pending.state != "skipped"
            pending.wait()
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        running = checkpointer.save(state, 4)
        skipped = checkpointer.save(state, 5)
        os.kill(checkpointer.writer_pid, signal.SIGCONT)
        assert skipped.state == "skipped"
        running.wait()
        checkpointer.save(state, 6).wait()
    assert chains.bases(tmp_path)[6] == (1,)


def test_saves_faster_than_storage_wait_their_turn(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    wanted = {}
    with Checkpointer(tmp_path, codec="zstd", incremental=True, keep=None) as checkpointer:
        for step in range(1, 13):
            state["w"] += 1e-5
            wanted[step] = copied(state)
            checkpointer.save(state, step)
    for step, tensors in wanted.items():
        assert_same(load_generation(tmp_path, step), tensors)


def test_a_discarded_save_is_no_base(tmp_path: Path) -> None:
    model = torch.nn.Linear(600, 600)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with Checkpointer(tmp_path, incremental=True, keep=None, fence="manual") as checkpointer:
        checkpointer.save(state, 1).wait()
        torn = checkpointer.save(state, 2)
        model.weight.data = torch.randn(600, 600)  # replaced before the fence
        with torch.no_grad():
            model.bias.add_(1)
        checkpointer.fence()
        with pytest.raises(SnapshotTorn):
            checkpointer.wait()
        assert torn.state == "failed"
        checkpointer.save(state, 3).wait()
        checkpointer.save(state, 4).wait()
    assert chains.bases(tmp_path) == {1: (), 3: (), 4: (3,)}
    found = load_generation(tmp_path)
    assert torch.equal(found["model"]["weight"], model.weight)


def test_after_a_save_that_failed_one_stands_alone(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        checkpointer.save(state, 1).wait()
        (tmp_path / "step-0000000002").touch()
        checkpointer.save(state, 2)
        with pytest.raises(SaveFailed):
            checkpointer.wait()
        for step in (3, 4):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait()
    assert chains.bases(tmp_path) == {1: (), 3: (), 4: (3,)}
    assert_same(load_generation(tmp_path), state)


def _removed(root: Path) -> None:
    for file in (root / "step-0000000001").iterdir():
        file.unlink()
    (root / "step-0000000001").rmdir()


def _quarantined(root: Path) -> None:
    update_tags(chains.store_at(root), "step-0000000001", add={"damaged": "a flipped bit"})


def _set_aside(root: Path) -> None:
    update_tags(chains.store_at(root), "step-0000000002", add={"aside": "went back"})


@pytest.mark.parametrize("spoil", [_removed, _quarantined, _set_aside])
def test_nothing_builds_on_what_went_bad_meanwhile(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    state = {"w": torch.randn(BIG), "frozen": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        for step in (1, 2):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait()
        spoil(tmp_path)
        for step in (3, 4):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait()
    assert {step: chains.bases(tmp_path)[step] for step in (3, 4)} == {3: (), 4: (3,)}
    assert_same(load_generation(tmp_path), state)


def test_a_killed_writer_gives_the_slab_back(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        step = 0
        for _ in range(3):
            for _ in range(2):
                step += 1
                state["w"] += 1e-5
                checkpointer.save(state, step).wait(timeout_s=60)
            assert checkpointer.writer_pid is not None
            os.kill(checkpointer.writer_pid, signal.SIGKILL)
            while checkpointer.writer_pid is not None:
                time.sleep(0.01)  # what is handed to a dead one is another test
    assert chains.bases(tmp_path) == {1: (), 2: (1,), 3: (), 4: (3,), 5: (), 6: (5,)}
    assert_same(load_generation(tmp_path), state)


def test_a_writer_killed_while_it_encodes_fails_one_save(tmp_path: Path) -> None:
    state = {"w": torch.randn(8 << 20)}
    with Checkpointer(tmp_path, codec="zstd", incremental=True, keep=None) as checkpointer:
        checkpointer.save(state, 1).wait()
        state["w"] += 1e-5
        pending = checkpointer.save(state, 2)
        assert checkpointer.writer_pid is not None
        time.sleep(0.01)
        os.kill(checkpointer.writer_pid, signal.SIGKILL)
        with contextlib.suppress(WriterDied):
            checkpointer.wait(timeout_s=60)
        assert pending.done
        for step in (3, 4):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait(timeout_s=60)
    assert {s: chains.bases(tmp_path)[s] for s in (3, 4)} == {3: (), 4: (3,)}
    assert_same(load_generation(tmp_path), state)
    assert_sound(tmp_path)


def test_a_stopped_writer_that_is_replaced_takes_no_slab_from_its_successor(
    tmp_path: Path,
) -> None:
    state = {"w": torch.randn(BIG)}
    wanted = {}
    with Checkpointer(tmp_path, incremental=True, keep=None, writer_timeout_s=2) as checkpointer:
        checkpointer.save(state, 1).wait()
        checkpointer.save(state, 2).wait()
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        checkpointer.save(state, 3)
        with pytest.raises(WriterDied):
            checkpointer.wait(timeout_s=60)
        for step in range(4, 9):
            state["w"] += 1e-5
            wanted[step] = copied(state)
            checkpointer.save(state, step).wait(timeout_s=60)
    for step, tensors in wanted.items():
        assert_same(load_generation(tmp_path, step), tensors)
    assert chains.bases(tmp_path)[8] == (4, 5, 6, 7)


def test_a_save_from_a_signal_handler_is_whole_and_replaces_no_base(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    inline = []
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state, step).wait()
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        writer = checkpointer.writer_pid
        pending = checkpointer.save(state, 3)

        def handler(*_: object) -> None:
            os.kill(writer, signal.SIGCONT)
            inline.append(checkpointer.save(state, 4, block="committed"))
            inline.append(checkpointer.save(state, 1, block="committed"))

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            checkpointer.wait(timeout_s=60)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert pending.state == "committed"
        checkpointer.save(state, 5).wait()
    store = chains.store_at(tmp_path)
    committed = chains.Catalog(store).committed()
    assert [one.step for one in committed] == [5, 4, 3, 2, 1, 1]
    for one in committed:
        assert verify(store, one).ok, one.folder
        assert_same(load_generation(tmp_path, folder=one.folder), state)


def test_a_step_that_is_saved_again_does_not_take_a_base_away(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        for step in (1, 2, 3):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait()
        newest = copied(state)
        state["w"].zero_()
        again = checkpointer.save(state, 2)
        again.wait()
    assert again.folder != "step-0000000002"
    assert_same(load_generation(tmp_path, folder=again.folder), state)
    assert_same(load_generation(tmp_path, 3), newest)


def test_going_back_leaves_the_bases_of_what_was_newer(tmp_path: Path) -> None:
    state = {"w": torch.randn(BIG)}
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        for step in (1, 2, 3):
            state["w"] += 1e-5
            checkpointer.save(state, step).wait()
    newest = copied(state)
    with Checkpointer(tmp_path, incremental=True, keep=None) as checkpointer:
        assert checkpointer.resume(state, step=1) is not None
        for step in (1, 2, 3, 4):
            state["w"] += 1
            checkpointer.save(state, step).wait()
    store = chains.store_at(tmp_path)
    for one in chains.Catalog(store).committed():
        assert verify(store, one).ok, one.folder
    assert_same(load_generation(tmp_path, folder="step-0000000003"), newest)
    assert_same(load_generation(tmp_path, 4), state)


def test_several_checkpointers_keep_their_bases_apart(tmp_path: Path) -> None:
    states = {name: {"w": torch.randn(BIG)} for name in "ab"}
    with (
        Checkpointer(tmp_path / "a", incremental=True, keep=None) as one,
        Checkpointer(tmp_path / "b", codec="zstd", incremental=True, keep=None) as other,
    ):
        for step in (1, 2, 3):
            for name, checkpointer in (("a", one), ("b", other)):
                states[name]["w"] += 1e-5
                checkpointer.save(states[name], step)
    for name, state in states.items():
        assert chains.bases(tmp_path / name)[3] == (1, 2)
        assert_same(load_generation(tmp_path / name), state)


THREADED = """
import os, sys
del os.memfd_create
import torch
from torch_ckpt import Checkpointer, load_generation
with Checkpointer(sys.argv[1], codec="zstd", incremental=True, keep=None) as checkpointer:
    state = {"t": torch.randn(1 << 18)}
    assert checkpointer.resume(state) is None
    for step in range(1, 5):
        state["t"] += 1e-5
        checkpointer.save(state, step).wait()
    assert checkpointer.writer_pid is None
    state["more"] = torch.randn(1 << 22)
    for step in (5, 6):
        checkpointer.save(state, step).wait()
loaded = load_generation(sys.argv[1])
assert all(torch.equal(loaded[name], state[name]) for name in state)
"""


def test_a_writing_thread_builds_on_the_last_save_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADED, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert chains.bases(tmp_path) == {1: (), 2: (1,), 3: (1, 2), 4: (1, 2, 3), 5: (), 6: (5,)}
