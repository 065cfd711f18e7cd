"""Under the plugin, everything of Lightning that saves, loads and removes keeps its meaning."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.fabric as fabric
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

from lightning_ckpt import TwoBufferCheckpointIO
from lightning_ckpt.reading import is_generation, read_checkpoint
from tests.lightning.job import Net, loader, net_for, run_ranks
from tests.lightning.plugged import checkpoint, checkpoints_of, same, trainer_with
from torch_ckpt import ConfigError, GenerationNotFound


class Recording(TwoBufferCheckpointIO):
    """Keeps, beside each generation, what stock Lightning would have written."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, f"{path}.stock")
        super().save_checkpoint(checkpoint, path, storage_options)


def test_top_k_last_and_best_hold_exactly_what_stock_lightning_would_have_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "files").mkdir()
    files = checkpoints_of(tmp_path, save_top_k=2, save_last=True)
    trainer = trainer_with(Recording(), tmp_path, files, max_epochs=4)
    trainer.fit(Net(), loader(), loader(shuffle=False))
    names = {path.name for path in (tmp_path / "files").glob("*.ckpt")}
    assert len(names) == 3
    assert "last.ckpt" in names
    assert {Path(name).name for name in files.best_k_models} == names - {"last.ckpt"}
    for name in names:
        stock = torch.load(tmp_path / "files" / f"{name}.stock", weights_only=True)
        assert same(read_checkpoint(tmp_path / "files" / name), stock)
    assert trainer.validate(ckpt_path="best", dataloaders=loader(shuffle=False), verbose=False)


@pytest.mark.parametrize("save_last", [True, "link"])
def test_fit_goes_on_from_last(tmp_path: Path, save_last: Any) -> None:
    for epochs, ckpt_path in ((2, None), (3, "last")):
        files = checkpoints_of(tmp_path, save_last=save_last)
        trainer = trainer_with(TwoBufferCheckpointIO(), tmp_path, files, max_epochs=epochs)
        trainer.fit(Net(), loader(), loader(shuffle=False), ckpt_path=ckpt_path)
        assert trainer.global_step == 8 * epochs
        assert files.last_model_path == str(tmp_path / "files" / "last.ckpt")
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 24
    assert Path(files.last_model_path).is_symlink() is (save_last == "link")
    assert not (tmp_path / "files" / "last-v1.ckpt").exists()


def test_a_second_name_for_one_step_costs_no_second_copy(tmp_path: Path) -> None:
    files = checkpoints_of(tmp_path, save_last=True)
    trainer = trainer_with(TwoBufferCheckpointIO(), tmp_path, files, max_epochs=1)
    trainer.fit(Net(), loader(), loader(shuffle=False))
    shards = [path.stat() for path in (tmp_path / "files").glob("*.ckpt/*.safetensors")]
    assert len(shards) == 2
    assert shards[0].st_ino == shards[1].st_ino


def test_a_name_exists_as_soon_as_it_was_saved_so_that_the_next_gets_another(
    tmp_path: Path,
) -> None:
    files = ModelCheckpoint(tmp_path / "files", filename="same", save_top_k=-1, monitor="val_loss")
    trainer = trainer_with(TwoBufferCheckpointIO(), tmp_path, files, max_epochs=3)
    trainer.fit(Net(), loader(), loader(shuffle=False))
    found = sorted(path.name for path in (tmp_path / "files").glob("*.ckpt"))
    assert found == ["same-v1.ckpt", "same-v2.ckpt", "same.ckpt"]
    steps = {name: read_checkpoint(tmp_path / "files" / name)["global_step"] for name in found}
    assert steps == {"same.ckpt": 8, "same-v1.ckpt": 16, "same-v2.ckpt": 24}


def test_a_removal_waits_for_the_commit_of_its_successor(tmp_path: Path) -> None:
    plugin = TwoBufferCheckpointIO()
    old, new, file = (tmp_path / name for name in ("1.ckpt", "2.ckpt", "0.ckpt"))
    torch.save(checkpoint(0), file)
    plugin.save_checkpoint(checkpoint(1), old)
    plugin.wait()
    writer = plugin._engine.writer_pid or 0
    assert writer > 1
    os.kill(writer, signal.SIGSTOP)
    try:
        plugin.save_checkpoint(checkpoint(2), new)
        plugin.remove_checkpoint(old)
        plugin.remove_checkpoint(file)
        time.sleep(0.3)
        assert not is_generation(str(new))
        assert read_checkpoint(old)["global_step"] == 1
        assert file.exists()
    finally:
        os.kill(writer, signal.SIGCONT)
    plugin.teardown()
    assert read_checkpoint(new)["global_step"] == 2
    assert not old.exists()
    assert not file.exists()


def test_there_is_a_complete_checkpoint_at_every_moment_after_the_first(tmp_path: Path) -> None:
    counts: list[int] = []
    done = threading.Event()

    def committed() -> list[Path]:
        return list(tmp_path.glob("files/*.ckpt/manifest.json"))

    def count() -> None:
        while not done.is_set():
            # A listing takes time: what commits meanwhile is not in it, and what goes is neither.
            counts.append(max(map(len, (committed(), committed()))))

    watching = threading.Thread(target=count)
    watching.start()
    try:
        files = ModelCheckpoint(tmp_path / "files", every_n_train_steps=1)
        trainer = trainer_with(TwoBufferCheckpointIO(), tmp_path, files, max_epochs=2)
        trainer.fit(Net(), loader())
    finally:
        done.set()
        watching.join()
    first = next(index for index, found in enumerate(counts) if found)
    assert min(counts[first:]) >= 1
    assert counts[-1] == 1


def test_a_link_to_something_never_committed_leads_to_the_newest_that_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = TwoBufferCheckpointIO()
    plugin.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    plugin.teardown()
    (tmp_path / "2.ckpt").mkdir()
    (tmp_path / "last.ckpt").symlink_to("2.ckpt")
    assert plugin.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 1
    assert "never committed" in caplog.text
    with pytest.raises(GenerationNotFound):
        plugin.load_checkpoint(tmp_path / "2.ckpt")


def test_saving_by_hand_is_a_generation_in_fit_and_an_ordinary_durable_file_after_it(
    tmp_path: Path,
) -> None:
    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "during.ckpt")

    trainer = trainer_with(TwoBufferCheckpointIO(), tmp_path, Saving(), max_epochs=1)
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert read_checkpoint(tmp_path / "during.ckpt")["global_step"] == 3
    assert torch.load(tmp_path / "after.ckpt", weights_only=True)["global_step"] == 8
    assert Net.load_from_checkpoint(tmp_path / "after.ckpt")


def test_one_plugin_serves_fit_validate_and_fit_again(tmp_path: Path) -> None:
    plugin = TwoBufferCheckpointIO()
    files = checkpoints_of(tmp_path, save_top_k=-1)
    trainer = trainer_with(plugin, tmp_path, files, max_epochs=1)
    model = Net()
    trainer.fit(model, loader(), loader(shuffle=False))
    trainer.validate(model, loader(shuffle=False), ckpt_path="best", verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(), loader(shuffle=False))
    found = sorted((tmp_path / "files").glob("*.ckpt"))
    assert [read_checkpoint(path)["global_step"] for path in found] == [8, 16]
    assert all(path.is_dir() for path in found)  # the second fit saved behind training as well


def test_a_save_inside_a_signal_handler_interrupts_anything_and_is_durable_on_return(
    tmp_path: Path,
) -> None:
    plugin = TwoBufferCheckpointIO()
    in_handler: list[Path] = []

    def save(*_: Any) -> None:
        path = tmp_path / f"handler-{len(in_handler)}.ckpt"
        plugin.save_checkpoint(checkpoint(len(in_handler)), path)
        assert torch.load(path, weights_only=True)["global_step"] == len(in_handler)
        in_handler.append(path)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.02))

    before = signal.signal(signal.SIGALRM, save)
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    try:
        deadline = time.monotonic() + 2.0
        step = 0
        while time.monotonic() < deadline:
            step += 1
            plugin.save_checkpoint(checkpoint(step), tmp_path / f"{step}.ckpt")
            if step > 2:
                plugin.remove_checkpoint(tmp_path / f"{step - 2}.ckpt")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    plugin.teardown()
    assert len(in_handler) > 20
    assert read_checkpoint(tmp_path / f"{step}.ckpt")["global_step"] == step


def test_fabric_saves_and_loads_by_keyword(tmp_path: Path) -> None:
    plugin = TwoBufferCheckpointIO()
    launcher = fabric.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = launcher.setup(model, optimizer)
    for step in range(1, 4):
        launcher.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        launcher.save(tmp_path / f"{step}.ckpt", {"model": model, "opt": optimizer, "step": step})
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.weight.zero_()
    rest = launcher.load(tmp_path / "3.ckpt", {"model": model, "opt": optimizer})
    assert rest == {"step": 3}
    assert same(dict(model.state_dict()), expected)
    assert launcher.load(tmp_path / "1.ckpt")["step"] == 1
    plugin.teardown()


def test_a_script_that_ends_without_a_word_leaves_its_last_save_complete(tmp_path: Path) -> None:
    script = """
import sys, torch, lightning.fabric as fabric
from lightning_ckpt import TwoBufferCheckpointIO
launcher = fabric.Fabric(accelerator="cpu", devices=1, plugins=[TwoBufferCheckpointIO()])
launcher.save(sys.argv[1] + "/1.ckpt", {"w": torch.arange(5), "step": 1})
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=90)
    assert torch.equal(read_checkpoint(tmp_path / "1.ckpt")["w"], torch.arange(5))


def test_a_rank_that_did_not_write_waits_for_what_it_reads(tmp_path: Path) -> None:
    job = {
        "folder": str(tmp_path),
        "root": str(tmp_path / "run"),
        "plugin": True,
        "reload_at": 3,
        "trainer": {"max_steps": 4, "devices": 2, "strategy": "ddp"},
    }
    for rank in run_ranks(job):
        assert rank.code == 0, rank.log
        assert rank.steps("reloaded") == [3]


def test_both_packages_take_the_same_plugin(tmp_path: Path) -> None:
    import pytorch_lightning
    from pytorch_lightning.callbacks import ModelCheckpoint as OlderModelCheckpoint

    plugin = TwoBufferCheckpointIO()
    files = OlderModelCheckpoint(tmp_path / "files")
    trainer = trainer_with(plugin, tmp_path, files, package=pytorch_lightning, max_epochs=1)
    trainer.fit(net_for(pytorch_lightning)(), loader())
    assert read_checkpoint(files.best_model_path)["global_step"] == 8
    pl.Trainer(plugins=[plugin], accelerator="cpu", logger=False)


@pytest.mark.parametrize("options", [{"mode": "slow"}, {"slabs": 3}, {"on_error": "ignore"}])
def test_an_option_that_cannot_be_used_is_refused_at_construction(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        TwoBufferCheckpointIO(**options)


def test_storage_options_belong_to_the_plugin(tmp_path: Path) -> None:
    plugin = TwoBufferCheckpointIO()
    with pytest.raises(TypeError, match="TwoBufferCheckpointIO\\(storage_options"):
        plugin.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt", storage_options={"key": "a"})


def test_checkpoints_in_another_file_system_work_alike() -> None:
    plugin = TwoBufferCheckpointIO()
    data = TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
    try:
        plugin.save_checkpoint(checkpoint(1), "memory://ckpt/.scratch.ckpt")
        assert plugin.load_checkpoint("memory://ckpt/.scratch.ckpt")["global_step"] == 1
        plugin.remove_checkpoint("memory://ckpt/.scratch.ckpt")
        with pytest.raises(GenerationNotFound):
            plugin.load_checkpoint("memory://ckpt/.scratch.ckpt")
    finally:
        plugin.teardown()
    assert len(data) == 16
