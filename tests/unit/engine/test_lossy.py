"""What loses something: only where a rule says so, within its bound, marked, and never alone."""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torch_ckpt import Checkpointer, ConfigError, KeepLast, load_generation
from torch_ckpt.cli.main import run
from torch_ckpt.codecs.fp8 import Fp8, Fp8Sqrt
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.local import LocalStore

SIZE = 1 << 19  # 2 MiB: blocks of their own
ERROR = 0.05


def training() -> Iterator[dict[str, Any]]:
    """States as training makes them: small steps, decaying moments."""
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(SIZE, generator=made)
    first, second = torch.zeros(SIZE), torch.zeros(SIZE)
    step = 0
    while True:
        step += 1
        gradient = torch.randn(SIZE, generator=made) * 1e-3
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        weight = weight - 1e-3 * first / (second.sqrt() + 1e-8)
        yield {
            "model": {"weight": weight},
            "optimizer": {"exp_avg": first, "exp_avg_sq": second},
            "other": weight * 2,
            "step": step,
        }


def saved(root: Path, count: int, **options: Any) -> list[dict[str, Any]]:
    """What was saved at steps 1 to `count`."""
    states = training()
    told = []
    with Checkpointer(root, **{"keep": None, "incremental": True, **options}) as checkpointer:
        for _ in range(count):
            state = next(states)
            told.append(state)
            checkpointer.save(state, state["step"], block="committed")
    return told


def loaded(root: Path, step: int) -> dict[str, Any]:
    return load_generation(str(root), step=step)


def lossy_steps(root: Path) -> list[int]:
    found = Catalog(LocalStore(str(root))).committed()
    return sorted(one.step for one in found if "lossy" in one.tags)


def test_only_what_a_rule_names_comes_back_as_other_values(tmp_path: Path) -> None:
    told = saved(tmp_path, 3, lossy_delta={"model.*": ERROR}, moments="fp8")
    assert lossy_steps(tmp_path) == [2, 3], "the first is without loss"
    for state in told:
        back = loaded(tmp_path, state["step"])
        assert torch.equal(back["other"], state["other"])
        same = torch.equal(back["model"]["weight"], state["model"]["weight"])
        assert same == (state["step"] == 1)
        same = torch.equal(back["optimizer"]["exp_avg"], state["optimizer"]["exp_avg"])
        assert same == (state["step"] == 1)
    for one in Catalog(LocalStore(str(tmp_path))).committed():
        assert verify(LocalStore(str(tmp_path)), one).ok


def test_moments_keep_their_bounds_and_no_second_moment_becomes_zero(tmp_path: Path) -> None:
    told = saved(tmp_path, 2, incremental=False, moments="fp8")
    back = loaded(tmp_path, 2)["optimizer"]
    for name, codec in {"exp_avg": Fp8(), "exp_avg_sq": Fp8Sqrt()}.items():
        raw = told[1]["optimizer"][name].numpy()
        allowed = codec.bound(memoryview(raw.tobytes()), dtype="float32")
        off = np.abs(back[name].numpy().astype(np.float64) - raw.astype(np.float64))
        assert (off <= allowed).all()
        assert off.max() > 0
    assert (back["exp_avg_sq"] > 0).all()


def test_errors_of_lossy_deltas_never_add_up(tmp_path: Path) -> None:
    told = saved(tmp_path, 8, lossy_delta={"model.*": ERROR})
    assert lossy_steps(tmp_path) == [2, 3, 4, 5, 6, 7, 8]
    for before, now in itertools.pairwise(told):
        step = now["step"]
        base = loaded(tmp_path, step - 1)["model"]["weight"].double()
        wanted = now["model"]["weight"].double()
        off = (loaded(tmp_path, step)["model"]["weight"].double() - wanted).abs()
        # Of the change since what a reader of the base gets, which is no more than one error off.
        change = (wanted - base).reshape(-1, 128)
        allowed = ERROR * change.square().mean(1).sqrt()
        assert (off.reshape(-1, 128).max(1).values <= allowed * (1 + 1e-6)).all()
        true = (wanted - before["model"]["weight"].double()).square().mean().sqrt()
        assert off.max() < 3 * ERROR * true


def test_a_generation_without_loss_comes_after_every_few_and_stays_beside_the_others(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 7, moments="fp8", incremental=False, full_every=2, keep=KeepLast(1))
    found = {one.step: one for one in Catalog(LocalStore(str(tmp_path))).committed()}
    assert list(found) == [7], "it stands alone"
    saved(tmp_path / "more", 6, moments="fp8", incremental=False, full_every=2, keep=KeepLast(1))
    found = {one.step: one for one in Catalog(LocalStore(str(tmp_path / "more"))).committed()}
    assert list(found) == [6, 4]
    assert "lossy" in found[6].tags
    assert "lossy" not in found[4].tags
    assert found[6].manifest.bases == (4,)


def test_what_is_permanent_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = training()
    with Checkpointer(tmp_path, incremental=True, moments="fp8", keep=None) as checkpointer:
        for step in (1, 2, 3):
            state = next(states)
            tags = ("permanent",) if step == 3 else ()
            checkpointer.save(state, step, block="committed", tags=tags)
    assert lossy_steps(tmp_path) == [2]
    assert torch.equal(loaded(tmp_path, 3)["optimizer"]["exp_avg"], state["optimizer"]["exp_avg"])
    assert run(["tag", str(tmp_path), "2", "permanent"]) != 0
    said = capsys.readouterr().err
    assert "step-0000000002 is stored with a loss (fp8" in said
    assert said.count("\n") == 1


def test_nobody_but_a_writer_says_what_is_lossy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 2, moments="fp8")
    for command, step in (("untag", "2"), ("tag", "1")):
        assert run([command, str(tmp_path), step, "lossy"]) != 0
        assert "says how a generation is stored" in capsys.readouterr().err
    assert lossy_steps(tmp_path) == [2]
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ConfigError, match="lossy"):
        checkpointer.save({"step": 3}, 3, tags=("lossy",))


def test_a_loss_is_told_wherever_a_generation_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (_, state) = saved(tmp_path, 2, moments="fp8")
    for command in ("show", "verify"):
        assert run([command, str(tmp_path)]) == 0
        assert "fp8 for *exp_avg" in capsys.readouterr().out
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path, keep=None) as checkpointer:
        assert checkpointer.resume(state) is not None
    assert any("step 2 was stored with a loss: fp8" in line for line in caplog.messages)


def test_numbers_that_are_none_are_kept_exactly(tmp_path: Path) -> None:
    weight = torch.randn(SIZE)
    strange = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, 1e-45, -0.0])
    with Checkpointer(
        tmp_path, incremental=True, moments="fp8", lossy_delta=ERROR, keep=None
    ) as checkpointer:
        for step in (1, 2):
            weight = weight * 1.001
            weight[1000:1006] = strange
            state = {"weight": weight, "exp_avg": weight.clone()}
            checkpointer.save(state, step, block="committed")
    assert lossy_steps(tmp_path) == [2]
    back = loaded(tmp_path, 2)
    for name in ("weight", "exp_avg"):
        found = back[name][1000:1006].view(torch.int32)
        assert torch.equal(found, strange.view(torch.int32)), name


def test_a_pattern_may_name_a_codec(tmp_path: Path) -> None:
    saved(tmp_path, 2, incremental=False, codec={"*exp_avg": "fp8", "*": "zstd"})
    back = loaded(tmp_path, 2)
    assert lossy_steps(tmp_path) == [2]
    (one, _) = Catalog(LocalStore(str(tmp_path))).committed()
    assert one.tags["lossy"] == "fp8 for *exp_avg"
    assert back["optimizer"]["exp_avg_sq"].shape == (SIZE,)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"codec": "zip"}, "codec must be one of raw, zstd, auto"),
        ({"codec": "fp8"}, "or map patterns"),
        ({"codec": {"*.w": "gzip"}}, r"'\*.w' to 'gzip'"),
        ({"moments": "fp4"}, "moments must be"),
        ({"lossy_delta": 0.05}, "needs incremental=True"),
        ({"lossy_delta": 2.0, "incremental": True}, "lossy_delta cannot be 2.0"),
        ({"lossy_delta": {"*": True}, "incremental": True}, "maps patterns to errors"),
        ({"incremental": True, "slabs": 1}, "needs slabs=2"),
        ({"full_every": 0}, "full_every must be"),
        ({"lossy_delta": "0.1", "incremental": True}, "lossy_delta cannot be '0.1'"),
        ({"codec": {f"layers.{i}.attention.weight": "zstd" for i in range(2000)}}, "by patterns"),
    ],
)
def test_options_that_cannot_be_used_are_refused_at_once(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Checkpointer(tmp_path, **options)


def test_a_permanent_second_name_of_a_lossy_step_loses_nothing(tmp_path: Path) -> None:
    states = training()
    with Checkpointer(tmp_path, moments="fp8", keep=None) as checkpointer:
        checkpointer.save(next(states), 1, block="committed")
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)  # both names are asked for before it works
        try:
            state = next(states)
            checkpointer.save(state, 2, folder="first")
            checkpointer.save(state, 2, folder="second", tags=("permanent",))
        finally:
            os.kill(checkpointer.writer_pid, signal.SIGCONT)
    found = {one.folder: one for one in Catalog(LocalStore(str(tmp_path))).committed()}
    assert "lossy" in found["first"].tags
    assert "lossy" not in found["second"].tags
    back = load_generation(tmp_path, folder="second")["optimizer"]["exp_avg"]
    assert torch.equal(back, state["optimizer"]["exp_avg"])


def test_a_generation_that_a_lossy_one_names_is_not_written_again(tmp_path: Path) -> None:
    states = training()
    with Checkpointer(tmp_path, moments="fp8", keep=None) as checkpointer:
        for step in (1, 2, 1):
            checkpointer.save(next(states), step, block="committed")
    store = LocalStore(str(tmp_path))
    committed = Catalog(store).committed()
    assert sorted(one.step for one in committed) == [1, 1, 2]
    assert all(verify(store, one).ok for one in committed)
