"""What leaves by `export` is bit for bit what was saved; `diff` finds each bit that is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning
import pytest
import safetensors.torch
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch.utils.data import DataLoader, TensorDataset

from tests.unit.cli.conftest import PROGRAM, Cli, flip, shard_in, state_at
from torch_ckpt import save_generation


def test_safetensors_holds_every_tensor_and_the_names_of_tied_ones(
    cli: Cli, root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"

    done = cli("export", root, 2, "--to", "safetensors", out)

    assert done.code == 0
    assert "tied: model.head is model.weight" in done.out
    saved = state_at(2)
    with safetensors.safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "model.head": "model.weight"}
        assert sorted(file.keys()) == ["empty", "model.bias", "model.weight", "z"]
        assert torch.equal(file.get_tensor("model.weight"), saved["model"]["weight"])
        assert torch.equal(file.get_tensor("model.bias"), saved["model"]["bias"])
        assert file.get_tensor("empty").shape == (0, 3)
        # safetensors' own description lacks complex numbers in older versions: these are bytes
        assert torch.equal(file.get_tensor("z").view(torch.complex64), saved["z"])


def test_a_model_leaves_under_its_own_names(cli: Cli, root: Path, tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(64, 32))
            self.bias = torch.nn.Parameter(torch.zeros(8))
            self.head = self.weight

    once, twice = tmp_path / "once.safetensors", tmp_path / "twice.safetensors"
    options = ("--to", "safetensors", "--only", "model.")
    assert cli("export", root, once, *options).code == 0
    found = json.loads(cli("export", root, twice, *options, "--copy-tied", "--json").out)

    assert found["tied"] == {}
    assert found["tensors"] == 3
    model = Model()
    assert safetensors.torch.load_model(model, once) == (set(), [])
    assert torch.equal(model.head, state_at(4)["model"]["weight"])
    assert model.load_state_dict(safetensors.torch.load_file(twice)) is not None


def test_a_file_that_is_there_is_kept_unless_forced(cli: Cli, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_text("precious")

    done = cli("export", root, "--to", "safetensors", out)
    assert done.code == 2
    assert "exists" in done.err
    assert out.read_text() == "precious"

    assert cli("export", root, "--to", "safetensors", out, "--force").code == 0
    assert len(safetensors.torch.load_file(out)) == 4


def test_damage_leaves_no_file(cli: Cli, root: Path, tmp_path: Path) -> None:
    shard = shard_in(root / "step-0000000002")
    flip(shard)
    folder = tmp_path / "exports"
    folder.mkdir()

    done = cli("export", root, 2, "--to", "safetensors", folder / "out")

    assert done.code == 1
    assert shard.name in done.err
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{out}",), "Missing option '--to'"),
        (("--to", "gguf", "{out}"), "'gguf' is not one of"),
        (("--to", "safetensors"), "give ROOT [STEP] OUT"),
        (("--to", "safetensors", "{out}/no/such/folder"), "its folder does not exist"),
        (("--to", "safetensors", "{folder}"), "is a folder"),
        (("--to", "safetensors", "{out}", "--only", "x."), "no tensor whose name begins with 'x.'"),
        (("--to", "lightning", "{out}"), "holds no Lightning checkpoint"),
        (("--to", "lightning", "{out}", "--only", "x."), "are for --to safetensors"),
        (("--to", "lightning", "{out}", "--import", "no_such_module"), "cannot import"),
    ],
)
def test_an_export_that_cannot_be_is_one_line(
    cli: Cli, root: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    places = {"out": tmp_path / "out", "folder": tmp_path}
    done = cli("export", root, *(argument.format(**places) for argument in arguments))
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


class Regression(lightning.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def trainer(**options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )


def test_stock_lightning_goes_on_from_an_export(cli: Cli, tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
    first = trainer(max_epochs=1)
    first.fit(Regression(), loader)
    first.save_checkpoint(tmp_path / "stock.ckpt")
    stock = torch.load(tmp_path / "stock.ckpt", weights_only=True)
    save_generation(tmp_path / "run", {**stock, "torch_ckpt": {"exact": 1}}, 4)
    out = tmp_path / "out.ckpt"

    done = cli("export", tmp_path / "run", "--to", "lightning", out)

    assert (done.code, done.err) == (0, "")
    exported = torch.load(out, weights_only=True)
    assert list(exported) == list(stock)
    assert torch.equal(exported["state_dict"]["layer.weight"], stock["state_dict"]["layer.weight"])
    assert exported["hyper_parameters"] == {"width": 4}
    assert torch.equal(
        Regression.load_from_checkpoint(out).layer.weight.data.cpu(),
        stock["state_dict"]["layer.weight"],
    )
    second = trainer(max_epochs=2)
    second.fit(Regression(), loader, ckpt_path=str(out))
    assert second.global_step == 8


@pytest.mark.slow
def test_classes_of_lightning_are_imported_and_others_by_permission(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_kinds.py").write_text("import enum\nclass Kind(enum.Enum):\n    GOOD = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    state = {
        "state_dict": {"w": torch.ones(2)},
        "pytorch-lightning_version": "2.6",
        "hyper_parameters": AttributeDict(a=1),
        "own": import_module("own_kinds").Kind.GOOD,
    }
    save_generation(tmp_path / "run", state, 1)
    del sys.modules["own_kinds"]
    arguments = ["export", str(tmp_path / "run"), "--to", "lightning", str(tmp_path / "out.ckpt")]

    done = cli(*arguments)
    assert done.code == 2
    assert "`--import own_kinds`" in done.err

    # Another process, in which nothing is loaded yet.
    line = [*PROGRAM, *arguments, "--import", "own_kinds"]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    fresh = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert fresh.returncode == 0, fresh.stderr
    assert "weights_only=False" in fresh.stderr
    assert "lightning.fabric.utilities.data.AttributeDict" in fresh.stderr


def test_pickled_objects_leave_by_permission(cli: Cli, tmp_path: Path) -> None:
    state = {"state_dict": {}, "pytorch-lightning_version": "2.6", "error": ValueError("x")}
    save_generation(tmp_path / "run", state, 1)
    arguments = ("export", tmp_path / "run", "--to", "lightning", tmp_path / "out.ckpt")

    done = cli(*arguments)
    assert done.code == 2
    assert "error (builtins.ValueError)" in done.err
    assert not (tmp_path / "out.ckpt").exists()

    assert cli(*arguments, "--allow-pickle").code == 0
    assert str(torch.load(tmp_path / "out.ckpt", weights_only=False)["error"]) == "x"


def test_equal_generations_are_equal(cli: Cli, root: Path, tmp_path: Path) -> None:
    save_generation(tmp_path / "again", state_at(2), 2)

    done = cli("diff", f"{root}@2", tmp_path / "again")

    assert done.code == 0
    assert done.out == "5 tensors and 6 objects compared: all equal\n"


def test_diff_says_which_and_by_how_much(cli: Cli, tmp_path: Path) -> None:
    one: dict[str, Any] = {
        "same": torch.ones(3),
        "moved": torch.tensor([1.0, 2.0, float("nan"), float("inf")]),
        "sign": torch.tensor([0.0]),
        "cast": torch.ones(2),
        "whole": torch.tensor([2**62, 5]),
        "fp8": torch.ones(2).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "gone": torch.ones(1),
        "rate": 1,
        "nested": {"a": [1, 2], "b": {}},
        "array": torch.arange(3).numpy(),
        "kind": (1, 2),
    }
    other = {
        **{key: value for key, value in one.items() if key != "gone"},
        "moved": torch.tensor([1.0, 2.5, float("nan"), float("inf")]),
        "sign": torch.tensor([-0.0]),
        "cast": torch.ones(2, dtype=torch.bfloat16),
        "whole": torch.tensor([2**62 + 1, 5]),
        "fp8": torch.full((2,), 2.0).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, True]),
        "new": torch.ones(1),
        "rate": 1.0,
        "nested": {"a": [1, 3], "b": {"c": 1}},
        "array": torch.arange(3).numpy() + 1,
        "kind": [1, 2],
    }
    save_generation(tmp_path / "a", one, 1)
    save_generation(tmp_path / "b", other, 1)

    done = cli("diff", tmp_path / "a" / "step-0000000001", f"{tmp_path / 'b'}@1", "--json")

    assert done.code == 1
    found = json.loads(done.out)
    assert found["equal"] is False
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert set(tensors) == {"moved", "sign", "cast", "whole", "fp8", "flags", "gone", "new"}
    assert tensors["moved"]["max_abs"] == 0.5
    assert tensors["moved"]["max_rel"] == 0.2
    assert (tensors["moved"]["count"], tensors["moved"]["elements"]) == (1, 4)
    assert (tensors["sign"]["max_abs"], tensors["sign"]["count"]) == (0.0, 1)
    assert tensors["cast"]["reason"] == "float32[2] and bfloat16[2]"
    assert tensors["whole"]["max_abs"] == 1.0
    assert tensors["fp8"]["max_abs"] == 1.0
    assert tensors["flags"]["max_abs"] == 1.0
    assert tensors["gone"]["only_in"] == "a"
    assert tensors["new"]["only_in"] == "b"
    objects = {item["path"]: (item["only_in"], item["a"], item["b"]) for item in found["objects"]}
    assert objects == {
        "rate": (None, "1", "1.0"),
        "nested.a.1": (None, "2", "3"),
        "nested.b.c": ("b", None, "1"),
        "array": (None, "<i8[3]", "<i8[3]"),
        "kind": (None, "a tuple", "a list"),
    }

    plain = cli("diff", tmp_path / "a", tmp_path / "b")
    assert plain.code == 1
    assert "only in A" in plain.out
    assert "13 differ" in plain.out


def test_diff_of_what_is_not_there_is_code_2(cli: Cli, root: Path) -> None:
    done = cli("diff", f"{root}@1", f"{root}@9")
    assert done.code == 2
    assert "no generation of step 9" in done.err
