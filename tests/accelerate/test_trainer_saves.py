"""What a Trainer with `TrainerCheckpoint` keeps, chooses, refuses and gives away."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, Trainer

from accelerate_ckpt import TrainerCheckpoint
from accelerate_ckpt.trainer_version import check_transformers
from tests.accelerate.trainer_job import (
    SAME,
    Interrupted,
    Watched,
    steps,
    train,
    trainer_of,
    usable,
)
from torch_ckpt import ConfigError, NothingUsable
from torch_ckpt.cli.main import run as command

EVAL = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "loss"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def job_in(folder: Path, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), "root": str(folder / "run"), **more}


def folder_of(job: dict[str, Any], step: int) -> Path:
    return Path(job["root"]) / f"step-{step:010d}"


def damage(job: dict[str, Any], step: int) -> None:
    """Flip a byte in the middle of what a generation holds."""
    (shard,) = folder_of(job, step).glob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_the_newest_stay_by_step_and_the_stray_and_the_touched_do_not_matter(
    tmp_path: Path,
) -> None:
    job = job_in(tmp_path, args={"save_steps": 1, "save_total_limit": 3, "max_steps": 8})
    with pytest.raises(Interrupted):
        train({**job, "interrupt_at": 6})
    assert steps(job["root"]) == [3, 4, 5]
    (Path(job["root"]) / "checkpoint-99").mkdir()
    (Path(job["root"]) / "stray.txt").write_text("nothing")
    for age, step in enumerate((5, 4, 3)):
        os.utime(folder_of(job, step), (1_000 + age, 1_000 + age))
    moved = {**job, "root": str(tmp_path / "moved")}
    shutil.move(job["root"], moved["root"])
    again = train(moved)
    assert again["seen"][0][0] == 5
    assert steps(moved["root"]) == [6, 7, 8]
    assert again["step"] == 8


def test_a_finished_run_that_is_started_again_ends_at_once(tmp_path: Path) -> None:
    job = job_in(tmp_path, args={"max_steps": 10})  # in mid-epoch: stock would take one step more
    first = train(job)
    again = train({**job, "seed": 5})
    assert again["seen"] == []
    assert again["step"] == first["step"] == 10
    assert again["model"] == first["model"]
    assert steps(job["root"]) == [4, 8, 10]
    longer = train({**job, "args": {"max_steps": 12}})
    assert [step for step, _ in longer["seen"]] == [10, 11]


def test_the_best_model_is_kept_and_loaded_at_the_end(tmp_path: Path) -> None:
    args = {**EVAL, "learning_rate": 0.5, "load_best_model_at_end": True, "save_total_limit": 1}
    job = job_in(tmp_path, args={**args, "warmup_steps": 4}, noise=False)
    trainer = trainer_of(job)
    trainer.train()
    losses = {
        line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line
    }
    best = min(losses, key=losses.__getitem__)
    assert best != 12  # or else this shows nothing
    assert steps(job["root"]) == [best, 12]
    assert trainer.state.best_model_checkpoint == str(folder_of(job, best))
    assert trainer.evaluate()["eval_loss"] == losses[best]
    again = trainer_of({**job, "seed": 3})
    again.train()
    assert again.state.best_metric == losses[best]
    assert again.evaluate()["eval_loss"] == losses[best]


def test_a_damaged_and_a_torn_generation_are_passed_over(tmp_path: Path) -> None:
    job = job_in(tmp_path, args={"save_steps": 3})
    whole = train({**job, "root": str(tmp_path / "whole")})
    with pytest.raises(Interrupted):
        train({**job, "interrupt_at": 11})
    damage(job, 6)
    (folder_of(job, 9) / "manifest.json").unlink()  # as if the last save had not ended
    again = train({**job, "seed": 7})
    assert again["seen"][0][0] == 3
    assert {key: again[key] for key in SAME} == {key: whole[key] for key in SAME}


@pytest.mark.slow
def test_where_nothing_can_be_used_training_does_not_begin(tmp_path: Path) -> None:
    job = job_in(tmp_path, args={"max_steps": 4})
    train(job)
    damage(job, 4)
    with pytest.raises(NothingUsable):
        train(job)


class WithNotes(Watched):
    """Writes a file of its own beside the model."""

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(str(output_dir)) / "notes"
        folder.mkdir()
        (folder / "step.txt").write_text(f"step {self.state.global_step}")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        (folder / "card.md").write_text("a card")


def test_stock_reads_what_is_exported_and_goes_on_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_in(tmp_path, noise=False, args={"dataloader_drop_last": True})
    whole = train(job, WithNotes)
    out = tmp_path / "checkpoint-8"
    arguments = ["export", job["root"], "8", str(out), "--to", "hf"]
    assert command(arguments) == 0
    assert command(arguments) != 0  # it is there now
    assert "--force" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == [
        "card.md", "config.json", "generation_config.json", "model.safetensors", "notes",
        "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin",
    ]  # fmt: skip
    assert (out / "notes" / "step.txt").read_text() == "step 8"
    stock = train({**job, "stock": True, "seed": 5, "from": str(out)})
    assert [step for step, _ in stock["seen"]] == [8, 9, 10, 11]
    assert {key: stock[key] for key in SAME} == {key: whole[key] for key in SAME}

    assert command(["export", job["root"], str(tmp_path / "last"), "--to", "hf"]) == 0
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "last")
    trained = trainer_of(job)
    trained.train()
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_what_no_trainer_saved_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch_ckpt import save_generation

    save_generation(tmp_path / "run", {"weight": torch.ones(2)}, 1)
    assert command(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hf"]) != 0
    assert "no state of a Hugging Face Trainer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(tmp_path)
    with pytest.raises(ConfigError, match="save_only_model"):
        trainer_of({**job, "args": {"save_only_model": True}})
    with pytest.raises(ConfigError, match="resume must be 'auto' or 'never'"):
        TrainerCheckpoint(job["root"], resume="always")  # type: ignore[arg-type]
    trainer = trainer_of(job)
    with pytest.raises(ConfigError, match="hyperparameter_search"):
        trainer.train(trial=object())
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ConfigError, match="cannot save with DeepSpeed"):
        TrainerCheckpoint(job["root"]).attach(trainer)
    trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled = False, True
    with pytest.raises(ConfigError, match="cannot save with FSDP1"):
        TrainerCheckpoint(job["root"]).attach(trainer)
    monkeypatch.setattr(Trainer, "_load_rng_state", lambda self, folder: None)
    with pytest.raises(ConfigError, match=r"_load_rng_state\(checkpoint\) has become \(folder\)"):
        check_transformers()


def test_step_10000_is_newer_than_step_9900_whatever_the_clock_says(tmp_path: Path) -> None:
    job = job_in(tmp_path, args={"save_steps": 100, "max_steps": 10_010, "logging_steps": 500})
    jump = {"jump_from": 1, "jump_to": 9_899, "interrupt_at": 10_001}
    with pytest.raises(Interrupted):
        train({**job, **jump})
    assert steps(job["root"]) == [9_900, 10_000]
    for age, step in enumerate((10_000, 9_900)):
        for path in [folder_of(job, step), *folder_of(job, step).iterdir()]:
            os.utime(path, (1_000 + age, 1_000 + age))
    trainer = trainer_of(job)
    trainer.train()
    assert trainer.seen[0][0] == 10_000
    assert trainer.state.global_step == 10_010


@pytest.mark.slow
def test_a_path_wins_and_leaves_what_is_newer_aside(tmp_path: Path) -> None:
    job = job_in(tmp_path, args={"save_steps": 2, "max_steps": 6})
    train(job)
    old = train({**job, "from": str(folder_of(job, 2))})
    assert old["seen"][0][0] == 2
    assert usable(job["root"]) == [6, 4, 2]
    assert len(steps(job["root"])) == 5  # the two that were left lie there too
    fresh = train({**job, "options": {"resume": "never"}, "args": {"max_steps": 3}})
    assert fresh["seen"][0][0] == 0
    assert usable(job["root"]) == [3]
    named = {**job, "options": {"resume": "never"}, "args": {"max_steps": 4}, "from": True}
    assert train(named)["seen"][0][0] == 3


@pytest.mark.slow
def test_the_root_may_be_lost_where_there_is_an_archive(tmp_path: Path) -> None:
    options = {"archive": str(tmp_path / "archive"), "codec": "zstd", "incremental": True}
    job = job_in(tmp_path, options=options, args={"max_steps": 4, "save_steps": 2})
    train(job)
    shutil.rmtree(job["root"])
    again = train({**job, "args": {"max_steps": 6}})
    assert again["seen"][0][0] == 4


@pytest.mark.slow
def test_a_model_that_is_no_pretrained_model_keeps_its_layout(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(6, 1)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.inner.forward(input_ids.float())
            return {"loss": (out - labels.float().mean(1, keepdim=True)).square().mean()}

    job = job_in(tmp_path, args={"max_steps": 4})

    class OfPlain(Watched):
        def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(Plain(), *args, **kwargs)

    trainer = trainer_of(job, OfPlain)
    trainer.train()
    assert command(["export", job["root"], str(tmp_path / "out"), "--to", "hf"]) == 0
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == {"inner.weight", "inner.bias"}
    assert torch.equal(saved["inner.weight"], trainer.model.state_dict()["inner.weight"])
    again = train({**job, "args": {"max_steps": 6}}, OfPlain)
    assert again["seen"][0][0] == 4


@pytest.mark.slow
def test_weights_that_a_subclass_writes_its_own_way_are_kept_as_it_wrote_them(
    tmp_path: Path,
) -> None:
    class Halves(Watched):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            half = {name: tensor.half() for name, tensor in self.model.state_dict().items()}
            self.accelerator.unwrap_model(self.model).save_pretrained(output_dir, state_dict=half)

    job = job_in(tmp_path, args={"max_steps": 4})
    trainer = trainer_of(job, Halves)
    trainer.train()
    assert command(["export", job["root"], str(tmp_path / "out"), "--to", "hf"]) == 0
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float16}
    again = trainer_of(job, Halves)
    again.train()
    assert again.model.lm_head.weight.dtype == torch.float32
    assert torch.equal(again.model.lm_head.weight, trainer.model.lm_head.weight)
