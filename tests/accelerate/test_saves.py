"""What `save_state` and `load_state` do through the engine: numbers, retention, errors."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator, data_loader
from accelerate.utils import ProjectConfiguration
from torch import nn

from accelerate_ckpt import CheckpointPlugin, CkptProjectConfiguration, attach, version
from accelerate_ckpt.stock import StockIncomplete
from tests.accelerate.job import committed, number_of, reset, run
from torch_ckpt import ConfigError, GenerationNotFound, NothingUsable, StateMismatch

pytestmark = pytest.mark.usefixtures("fresh")


class Run:
    """An Accelerator with something to train."""

    def __init__(
        self, folder: Path, plugin: CheckpointPlugin | None = None, **project: Any
    ) -> None:
        reset()
        configuration = ProjectConfiguration(
            **{"project_dir": str(folder), "automatic_checkpoint_naming": True, **project}
        )
        self.accelerator = Accelerator(cpu=True, project_config=configuration)
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        self.net, self.optimizer = self.accelerator.prepare(
            net, torch.optim.AdamW(net.parameters())
        )
        self.checkpoints = attach(self.accelerator, plugin)

    def step(self) -> None:
        self.net(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weight(self) -> torch.Tensor:
        return self.net.weight.detach().clone()


def names(folder: Path) -> list[str]:
    return committed(str(folder / "checkpoints"))


def test_of_twelve_saves_with_a_limit_of_three_the_newest_three_remain(tmp_path: Path) -> None:
    job = Run(tmp_path, total_limit=3)
    for _ in range(12):
        job.accelerator.save_state()  # without a step between: each is a generation all the same
    job.accelerator.end_training()
    assert names(tmp_path) == ["checkpoint_9", "checkpoint_10", "checkpoint_11"]


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    job = Run(tmp_path, total_limit=2)
    paths = []
    for _ in range(3):
        job.step()
        paths.append(job.accelerator.save_state())
    assert paths[-1] == tmp_path / "checkpoints" / "checkpoint_2"
    kept = job.weight()
    job.step()
    job.checkpoints.close()

    job = Run(tmp_path, total_limit=2)
    (tmp_path / "checkpoints" / "stray.txt").write_text("not a checkpoint")
    job.accelerator.load_state()
    assert torch.equal(job.weight(), kept)
    assert job.checkpoints.step == 3
    for _ in range(2):
        job.step()
        job.accelerator.save_state()
    job.checkpoints.close()
    assert names(tmp_path) == ["checkpoint_3", "checkpoint_4"]
    assert number_of(tmp_path / "checkpoints" / "checkpoint_4") == 5


def test_steps_and_not_names_or_times_say_which_is_the_newest(tmp_path: Path) -> None:
    job = Run(tmp_path / "old", automatic_checkpoint_naming=False)
    job.checkpoints._places.steps = 9_900
    for name in ("9900", "10000"):
        job.accelerator.save_state(f"somewhere/{name}")
        job.checkpoints._places.steps += 100
    job.checkpoints.close()
    assert not (Path.cwd() / "somewhere").exists()
    shutil.move(tmp_path / "old", tmp_path / "new")
    for age, name in enumerate(("10000", "9900")):
        os.utime(tmp_path / "new" / "checkpoints" / name, (1_000 + age, 1_000 + age))
    job = Run(tmp_path / "new")
    position = job.checkpoints.resume()
    assert position is not None
    assert (position.step, Path(position.generation).name) == (10_000, "10000")
    job.checkpoints.close()


def test_load_state_of_a_name_leaves_what_is_newer_aside_at_the_next_save(tmp_path: Path) -> None:
    job = Run(tmp_path)
    weights = []
    for _ in range(3):
        job.step()
        job.accelerator.save_state()
        weights.append(job.weight())
    job.accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert torch.equal(job.weight(), weights[0])
    assert all(not one.tags for one in job.checkpoints._open().generations())
    job.step()
    job.accelerator.save_state()
    job.checkpoints.close()
    job = Run(tmp_path)
    position = job.checkpoints.resume()
    assert position is not None
    assert position.step == 2
    assert torch.equal(job.weight(), weights[1])  # the same step was taken again
    job.checkpoints.close()


def test_a_damaged_newest_generation_is_passed_over(tmp_path: Path) -> None:
    job = Run(tmp_path)
    for _ in range(2):
        job.step()
        job.accelerator.save_state()
    job.checkpoints.close()
    for path in (tmp_path / "checkpoints" / "checkpoint_1").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8] + b"damaged!")
    job = Run(tmp_path)
    job.accelerator.load_state()
    assert job.checkpoints.step == 1
    job.checkpoints.close()
    for path in (tmp_path / "checkpoints" / "checkpoint_0").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8] + b"damaged!")
    with pytest.raises(NothingUsable):
        Run(tmp_path).accelerator.load_state()


def test_a_first_run_is_told_so_by_file_not_found(tmp_path: Path) -> None:
    job = Run(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no generation yet"):
        job.accelerator.load_state()
    assert job.checkpoints.resume() is None
    with pytest.raises(GenerationNotFound, match="neither a generation in"):
        job.accelerator.load_state(str(tmp_path))  # a foreign folder
    job.checkpoints.close()


def test_a_run_that_loads_nothing_sets_aside_what_is_there_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Run(tmp_path)
    job.step()
    job.accelerator.save_state()
    job.checkpoints.close()
    job = Run(tmp_path, CheckpointPlugin(resume="never"))
    with pytest.raises(FileNotFoundError, match="never"):
        job.accelerator.load_state()
    job.accelerator.save_state()
    job.checkpoints.close()
    assert "nothing was loaded before this save, so 1 generations" in caplog.text
    job = Run(tmp_path)
    job.accelerator.load_state()
    assert job.checkpoints.step == 0
    job.checkpoints.close()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    job = Run(tmp_path)
    job.accelerator.save_state()
    job.checkpoints.close()
    job = Run(tmp_path)
    job.accelerator.register_for_checkpointing(torch.optim.SGD([torch.zeros(1)], 0.1))
    with pytest.raises(StateMismatch, match="custom"):
        job.accelerator.load_state()
    job.checkpoints.close()


def test_a_scaler_and_registered_objects_come_back(tmp_path: Path) -> None:
    def prepared() -> Run:
        job = Run(tmp_path)
        job.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        job.accelerator.register_for_checkpointing(nn.Linear(2, 2))
        return job

    job = prepared()
    job.accelerator.scaler.load_state_dict({**job.accelerator.scaler.state_dict(), "scale": 64.0})
    registered = job.accelerator._custom_objects[0].weight.detach().clone()
    job.accelerator.save_state()
    job.checkpoints.close()
    job = prepared()
    job.accelerator.load_state()
    assert job.accelerator.scaler.state_dict()["scale"] == 64.0
    assert torch.equal(job.accelerator._custom_objects[0].weight, registered)
    job.checkpoints.close()


def test_what_hooks_write_is_part_of_the_generation(tmp_path: Path) -> None:
    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        Path(folder, "deep").mkdir()
        torch.save(weights.pop(), Path(folder, "deep", "own.pt"))

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder, "deep", "own.pt")))

    job = Run(tmp_path)
    job.accelerator.register_save_state_pre_hook(save)
    job.step()
    job.accelerator.save_state()
    kept = job.weight()
    job.step()
    with pytest.raises(StateMismatch, match=r"models\.0"):
        job.accelerator.load_state()  # nobody has loaded that model
    job.checkpoints.close()
    job = Run(tmp_path)
    job.accelerator.register_load_state_pre_hook(load)
    job.accelerator.load_state()
    assert torch.equal(job.weight(), kept)
    job.checkpoints.close()


def stock_save(folder: Path, saves: int) -> list[torch.Tensor]:
    job = Run(folder)
    weights = []
    for _ in range(saves):
        job.step()
        job.checkpoints._stock["save_state"]()
        weights.append(job.weight())
    job.checkpoints.close()
    return weights


def test_the_newest_complete_stock_folder_is_loaded_and_numbers_go_on(tmp_path: Path) -> None:
    weights = stock_save(tmp_path, 3)
    (tmp_path / "checkpoints" / "checkpoint_2" / "optimizer.bin").unlink()
    job = Run(tmp_path)
    job.accelerator.load_state()
    assert torch.equal(job.weight(), weights[1])
    assert job.checkpoints.step == 2
    with pytest.raises(ConfigError, match="stock Accelerate wrote"):
        job.accelerator.save_state()  # over the incomplete one
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint_2")
    job.step()
    job.accelerator.save_state()
    job.checkpoints.close()
    assert names(tmp_path) == ["checkpoint_2"]
    assert number_of(tmp_path / "checkpoints" / "checkpoint_2") == 3


def test_a_stock_folder_without_a_ranks_file_or_a_part_is_explained(tmp_path: Path) -> None:
    stock_save(tmp_path, 1)
    folder = tmp_path / "checkpoints" / "checkpoint_0"
    shutil.copy(folder / "random_states_0.pkl", folder / "random_states_1.pkl")
    job = Run(tmp_path)
    with pytest.raises(StockIncomplete, match="random states of 2 ranks, and this job has 1"):
        job.accelerator.load_state(str(folder))
    (folder / "random_states_1.pkl").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(StockIncomplete, match="lacks model"):
        job.accelerator.load_state(str(folder))
    job.checkpoints.close()


def test_the_project_configuration_carries_the_plugin(tmp_path: Path) -> None:
    plugin = CheckpointPlugin(root=tmp_path / "elsewhere")
    configuration = CkptProjectConfiguration(project_dir=str(tmp_path), ckpt=plugin)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    with attach(accelerator) as checkpoints:
        assert checkpoints.root == str(tmp_path / "elsewhere")
        assert attach(accelerator) is checkpoints
    assert accelerator.save_state.__self__ is accelerator  # its own again


def test_a_codec_the_engine_does_not_have_is_refused(tmp_path: Path) -> None:
    job = Run(tmp_path, CheckpointPlugin(codec="zip"))
    with pytest.raises(ConfigError, match="codec must be one of raw"):
        job.accelerator.save_state()
    job.checkpoints.close()


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "FSDP"])
def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path))
    accelerator.state._shared_state["distributed_type"] = accelerate.DistributedType[kind]
    accelerator.state._shared_state["fsdp_plugin"] = SimpleNamespace(fsdp_version=1)
    with pytest.raises(ConfigError, match="FSDP1" if kind == "FSDP" else kind):
        attach(accelerator)


def test_an_untested_accelerate_gets_a_warning_with_the_range_and_a_changed_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accelerate, "__version__", "9.0")
    monkeypatch.setattr(version, "_warned", False)  # the one here may be untested itself
    with caplog.at_level(logging.WARNING):
        version.check_version()
    assert "Accelerate 9.0 is untested" in caplog.text
    assert "{} and newer, before {}".format(*version.TESTED) in caplog.text
    monkeypatch.setattr(Accelerator, "save_state", lambda self, where: None)
    with pytest.raises(ConfigError, match=r"save_state\(output_dir\) has become \(where\)"):
        version.check_version()


def test_an_accelerate_that_forgets_the_epoch_when_it_skips_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_loader, "skip_first_batches", lambda dataloader, num_batches=0: None)
    with pytest.raises(ConfigError, match="skip_first_batches does not keep the epoch"):
        version.check_version()


def lonely(job: dict[str, Any]) -> None:
    """Only rank 0 saves."""
    run_ = Run(Path(job["folder"]), CheckpointPlugin(timeout_s=3))
    run_.checkpoints.resume()
    print(json.dumps({"what": "ready"}), flush=True)
    try:
        if run_.accelerator.is_main_process:
            run_.accelerator.save_state()
    except Exception as error:
        print(json.dumps({"what": str(error)}), flush=True)
    os._exit(0)


def crowd(job: dict[str, Any]) -> None:
    """Fifty saves, of which one stays."""
    run_ = Run(Path(job["folder"]), total_limit=1)
    for _ in range(50):
        run_.accelerator.save_state()
    run_.accelerator.end_training()


def test_a_save_on_one_rank_only_is_an_error_and_no_hang(tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "main": "tests.accelerate.test_saves:lonely"}
    first, _ = run(job, 2, timeout_s=40)
    assert first.lines[0]["what"] == "ready", first.log
    assert "not all ranks did within 3 s" in first.lines[1]["what"] or (
        "rank 0 came to" in first.lines[1]["what"]
    )


@pytest.mark.slow
def test_four_ranks_save_fifty_times_with_a_limit_of_one(tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "main": "tests.accelerate.test_saves:crowd"}
    for done in run(job, 4):
        assert done.code == 0, done.log
        assert "Error" not in done.log
    assert names(tmp_path) == ["checkpoint_49"]


def test_a_run_whose_folder_is_lost_goes_on_from_its_archive(tmp_path: Path) -> None:
    plugin = CheckpointPlugin(
        root=str(tmp_path / "root"),
        archive=str(tmp_path / "archive"),
        cache=str(tmp_path / "cache"),
        keep="last=1",
    )
    job = Run(tmp_path, plugin)
    for _ in range(3):
        job.step()
        job.accelerator.save_state()
    job.checkpoints.close()
    assert len(committed(str(tmp_path / "root"))) == 1
    assert len(committed(str(tmp_path / "archive"))) == 3
    shutil.rmtree(tmp_path / "root")
    shutil.rmtree(tmp_path / "cache")
    again = Run(tmp_path, plugin)
    assert again.checkpoints.resume() is not None
    assert torch.equal(again.weight(), job.weight())
    again.checkpoints.close()
