"""Saves in the background: fence, slabs, failures, lines, names and retention."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt import (
    Checkpointer,
    ConfigError,
    KeepBest,
    KeepLast,
    NothingUsable,
    SaveFailed,
    SaveSkipped,
    SnapshotTorn,
    WriterDied,
    load_generation,
    save_generation,
)
from torch_ckpt.manifest.commit import update_tags
from torch_ckpt.storage.store import open_store


def model_and_optimizer(size: int = 64) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.BatchNorm1d(size))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train_step(state: dict[str, Any], size: int = 64) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, size)).square().mean().backward()
    state["optimizer"].step()


def weights(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_a_snapshot_is_of_the_moment_of_the_save(tmp_path: Path) -> None:
    state = model_and_optimizer()
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        expected = {}
        for step in range(1, 6):
            train_step(state)
            expected[step] = weights(state)
            checkpointer.save(state, step)
        checkpointer.wait()
    for step, tensors in expected.items():
        assert same(load_generation(tmp_path, step)["model"], tensors)


def test_the_optimizer_step_waits_for_the_copy_and_nothing_else_does(tmp_path: Path) -> None:
    state = model_and_optimizer()
    train_step(state)
    with Checkpointer(tmp_path) as checkpointer:
        pending = checkpointer.save(state, 1)
        state["model"](torch.randn(8, 64))  # forward changes running statistics, copied already
        assert pending.state in ("copying", "staged")
        state["optimizer"].step()
        assert pending.state == "staged" or pending.done
        checkpointer.wait()
        assert pending.state == "committed"


@pytest.mark.parametrize("block", ["staged", "committed"])
def test_a_save_that_blocks_returns_in_that_state(tmp_path: Path, block: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        pending = checkpointer.save({"t": torch.ones(3)}, 1, block=block)
        assert pending.state in ((block, "committed") if block == "staged" else ("committed",))


def test_sync_mode_commits_before_save_returns(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, mode="sync", slabs=1) as checkpointer:
        for step in (1, 2):
            assert checkpointer.save({"t": torch.ones(3)}, step).state == "committed"


def test_a_tensor_without_elements_is_never_torn(tmp_path: Path) -> None:
    empty, parameter = torch.empty(0, 3), torch.nn.Parameter(torch.empty(0, 3))
    state = {"empty": empty, "optimizer": torch.optim.SGD([parameter], 0.1), "model": parameter}
    checkpointer = Checkpointer(tmp_path, fence="manual")
    pending = checkpointer.save(state, 1)
    empty.add_(1)  # it lies where the optimizer's own does: nowhere
    checkpointer.close()
    assert pending.state == "committed"


def test_a_tensor_that_changes_before_the_fence_fails_that_save_by_name(tmp_path: Path) -> None:
    state = model_and_optimizer()
    train_step(state)
    checkpointer = Checkpointer(tmp_path, fence="manual")
    pending = checkpointer.save(state, 1)
    with torch.no_grad():
        state["model"][0].weight.add_(1)
    with pytest.raises(SnapshotTorn, match=r"model\.0\.weight"):
        checkpointer.wait()
    assert pending.state == "failed"
    checkpointer.save(state, 2)
    checkpointer.close()
    assert [one.step for one in checkpointer.generations()] == [2]


def test_the_second_name_of_a_step_shares_its_bytes(tmp_path: Path) -> None:
    state = model_and_optimizer()
    train_step(state)
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        checkpointer.save(state, 1, folder="epoch=0-step=1.ckpt")
        checkpointer.save(state, 1, folder="last.ckpt")
        train_step(state)
        checkpointer.save(state, 1, folder="changed.ckpt")
        checkpointer.wait()
    inode = {
        name: next((tmp_path / name).glob("*.safetensors")).stat().st_ino
        for name in ("epoch=0-step=1.ckpt", "last.ckpt", "changed.ckpt")
    }
    assert inode["epoch=0-step=1.ckpt"] == inode["last.ckpt"] != inode["changed.ckpt"]
    assert same(load_generation(tmp_path, folder="changed.ckpt")["model"], weights(state))


def test_a_second_name_outlives_the_first(tmp_path: Path) -> None:
    state = {"t": torch.arange(4)}
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        checkpointer.save(state, 1, folder="a")
        checkpointer.save(state, 1, folder="b")
        checkpointer.remove("a")
        checkpointer.wait()
    assert [one.folder for one in checkpointer.generations()] == ["b"]
    assert torch.equal(load_generation(tmp_path)["t"], state["t"])


def test_the_same_step_saved_again_replaces_it_whole(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"t": torch.zeros(4)}, 1)
        checkpointer.save({"t": torch.ones(4)}, 1)
        checkpointer.wait()
        assert torch.equal(load_generation(tmp_path, 1)["t"], torch.ones(4))
        assert len(list(tmp_path.glob("step-*/*.json"))) == 2, "one manifest, one part"


def test_retention_keeps_what_its_rules_name(tmp_path: Path) -> None:
    keep = KeepLast(1) | KeepBest("loss", 1)
    with Checkpointer(tmp_path, keep=keep) as checkpointer:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 5.0)):
            checkpointer.save({"t": step}, step, metrics={"loss": loss})
        checkpointer.save({"t": 0}, 5, tags=["permanent"], metrics={"loss": 9.0})
        checkpointer.save({"t": 0}, 6, metrics={"loss": 9.0})
        checkpointer.wait()
        assert [one.step for one in checkpointer.generations()] == [6, 5, 2]


def test_a_dead_writer_fails_its_save_and_the_next_one_works(tmp_path: Path) -> None:
    state = {"t": torch.ones(1 << 20)}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, 1, block="committed")
    first = checkpointer.writer_pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)  # so that the save is certainly still running
    pending = checkpointer.save(state, 2, block="staged")
    os.kill(first, signal.SIGKILL)
    with pytest.raises(WriterDied, match="ended with code -9"):
        pending.wait()
    checkpointer.save(state, 3)
    with pytest.raises(WriterDied):
        checkpointer.close()
    assert checkpointer.writer_pid is None
    assert [one.step for one in checkpointer.generations()] == [3, 1]


def test_a_stopped_writer_is_replaced_after_the_time_out(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, writer_timeout_s=2)
    checkpointer.save({"t": torch.ones(3)}, 1, block="committed")
    assert checkpointer.writer_pid is not None
    os.kill(checkpointer.writer_pid, signal.SIGSTOP)
    pending = checkpointer.save({"t": torch.ones(3)}, 2, block="staged")
    with pytest.raises(WriterDied, match="did not answer for 2 s"):
        pending.wait()
    checkpointer.save({"t": torch.ones(3)}, 3)
    with pytest.raises(WriterDied):
        checkpointer.wait()
    checkpointer.close()
    assert [one.step for one in checkpointer.generations()] == [3, 1]


def test_busy_slabs_skip_a_save_where_that_is_asked(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, on_busy="skip") as checkpointer:
        checkpointer.save({"t": 0}, 1, block="committed")
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        states = [checkpointer.save({"t": 0}, step).state for step in (2, 3, 4, 5)]
        os.kill(checkpointer.writer_pid, signal.SIGCONT)
        checkpointer.wait()
    assert states == ["staged", "staged", "skipped", "skipped"]
    assert [one.step for one in checkpointer.generations()] == [3, 2, 1]


def test_a_skipped_save_says_so_when_waited_for(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, on_busy="skip", slabs=1) as checkpointer:
        checkpointer.save({"t": 0}, 1, block="committed")
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        checkpointer.save({"t": 0}, 2)
        pending = checkpointer.save({"t": 0}, 3)
        os.kill(checkpointer.writer_pid, signal.SIGCONT)
        with pytest.raises(SaveSkipped, match="step 3"):
            pending.wait()


def test_a_failure_is_raised_once_and_training_goes_on(tmp_path: Path) -> None:
    blocked = tmp_path / "step-0000000002"
    blocked.write_text("a file where the folder should be")
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save({"t": step}, step)
    with pytest.raises(SaveFailed, match="step 2"):
        checkpointer.wait()
    checkpointer.wait()
    checkpointer.close()
    assert [one.step for one in checkpointer.generations()] == [3, 1]


def test_a_failure_ends_the_next_save_where_that_is_asked(tmp_path: Path) -> None:
    (tmp_path / "step-0000000001").write_text("")
    checkpointer = Checkpointer(tmp_path, on_error="raise")
    pending = checkpointer.save({"t": 0}, 1)
    with pytest.raises(SaveFailed):
        pending.wait()
    with pytest.raises(SaveFailed, match="step 1"):
        checkpointer.save({"t": 0}, 2)
    checkpointer.close()


def test_going_back_opens_a_new_line_and_keeps_the_old_one(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        for step in (100, 200, 300):
            checkpointer.save({"v": step}, step)
    state: dict[str, Any] = {"v": 0}
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        checkpointer.resume(state, step=100)
        assert state["v"] == 100
        checkpointer.save({"v": -200}, 200)
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        found = checkpointer.resume(state)
        assert found is not None
        assert (found.step, state["v"]) == (200, -200)
        assert found.manifest.parent is not None
        assert found.manifest.parent["step"] == 100
        listed = {(one.step, "aside" in one.tags) for one in checkpointer.generations()}
    assert listed == {(100, False), (200, True), (200, False), (300, True)}
    assert load_generation(tmp_path, folder="step-0000000300")["v"] == 300


def test_something_there_but_nothing_usable_is_an_error(tmp_path: Path) -> None:
    generation = save_generation(tmp_path, {"v": 1}, 5)
    update_tags(open_store(str(tmp_path)), generation.folder, add={"damaged": "seen by a test"})
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(NothingUsable, match="seen by a"):
        checkpointer.resume({"v": 0})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 3}, "keep must be a rule"),
        ({"mode": "fast"}, "mode must be 'async' or 'sync'"),
        ({"slabs": 3}, "slabs must be 1 or 2"),
        ({"slabs": True}, "slabs must be 1 or 2"),
        ({"on_busy": "drop"}, "on_busy"),
        ({"on_error": "ignore"}, "on_error"),
        ({"fence": "auto"}, "fence"),
        ({"writer_timeout_s": 0}, "positive number of seconds"),
    ],
)
def test_bad_options_are_refused_at_construction(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Checkpointer(tmp_path, **options)


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, None])
def test_a_bad_step_is_refused(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ConfigError, match="step must be"):
        checkpointer.save({"t": 0}, step)


def test_a_closed_checkpointer_says_so(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(ConfigError, match="closed"):
        checkpointer.save({"t": 0}, 1)


def test_a_save_inside_a_signal_handler_is_durable_on_return(tmp_path: Path) -> None:
    state = {"t": torch.randn(1 << 20)}
    seen: list[str] = []
    checkpointer = Checkpointer(tmp_path, keep=None)

    def handler(*_: object) -> None:
        seen.append(checkpointer.save(state, 10 + len(seen), block="committed").state)

    old = signal.signal(signal.SIGALRM, handler)
    try:
        for step in range(8):
            # One shot each, at another moment each time: handlers must not pile up.
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.003 * step)
            checkpointer.save(state, step)
            checkpointer.wait()
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, old)
    checkpointer.close()
    assert seen
    assert set(seen) == {"committed"}
    steps = {one.step for one in checkpointer.generations()}
    assert steps == set(range(8)) | set(range(10, 10 + len(seen)))


def test_a_forked_child_cannot_use_the_checkpointer_of_its_parent(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"t": 0}, 1, block="committed")
        pid = os.fork()
        if pid == 0:
            try:
                checkpointer.save({"t": 0}, 2)
            except ConfigError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        checkpointer.save({"t": 0}, 3, block="committed")
