"""`accelerate-ckpt`: a script that knows nothing of it, started by its command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from accelerate_ckpt.cli import main
from accelerate_ckpt.launch import take_ours
from tests.examples.running import EXAMPLES, output, until
from tests.ports import free_port
from torch_ckpt import ConfigError

DIGITS = EXAMPLES / "accelerate_digits.py"
COMMAND = [sys.executable, "-c", "from accelerate_ckpt.cli import console; console()"]
STOCK = [sys.executable, "-m", "accelerate.commands.launch"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "CKPT_")):
            monkeypatch.delenv(name)


def start(command: list[str], *words: object, cwd: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(cwd)}
    return subprocess.Popen(
        [*command, *map(str, words)],
        cwd=cwd,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def digits(project: Path, *more: object) -> list[object]:
    return [DIGITS, "--project", project, "--epochs", 2, "--save-every", 5, *more]


def weights(out: str) -> str:
    return next(line for line in out.splitlines() if line.startswith("weights"))


def committed(root: Path) -> int:
    return len(list(root.glob("*/manifest.json")))


def kill_when_saved(folder: Path, root: Path, *options: object) -> None:
    """Start the example as the launcher starts it, and kill it after two saves."""
    command = [sys.executable, "-m", "accelerate_ckpt.run"]
    os.environ.update({"ACCELERATE_USE_CKPT": "true", "ACCELERATE_CKPT_ROOT": str(root)})
    try:
        process = start(command, *digits(folder / "ours", *options), cwd=folder)
    finally:
        del os.environ["ACCELERATE_USE_CKPT"], os.environ["ACCELERATE_CKPT_ROOT"]
    until(lambda: committed(root) >= 2 or process.poll() is not None)
    process.kill()
    output(process, -9)


@pytest.mark.slow
def test_the_same_script_runs_stock_and_with_the_flag_and_is_exact_after_a_kill(
    tmp_path: Path,
) -> None:
    before = DIGITS.read_bytes()
    root = tmp_path / "root"
    kill_when_saved(tmp_path, root)
    stock = start(STOCK, "--cpu", "--num_processes=1", *digits(tmp_path / "stock"), cwd=tmp_path)
    expected = weights(output(stock, 0)[0])
    ours = start(
        COMMAND, "launch", "--cpu", "--num_processes=1", "--ckpt_root", root, "--ckpt_keep=last=2",
        *digits(tmp_path / "ours"), cwd=tmp_path,
    )  # fmt: skip
    out, err = output(ours, 0)
    assert out.startswith("goes on in epoch"), err
    assert weights(out) == expected
    assert committed(root) == 2
    assert DIGITS.read_bytes() == before
    assert not (tmp_path / "ours" / "checkpoints").exists()


@pytest.mark.slow
def test_two_ranks_killed_and_launched_again_come_to_what_stock_comes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # with --multi_gpu: gloo ranks of torchrun
    root, before = tmp_path / "root", DIGITS.read_bytes()
    ranks = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--main_process_ip=127.0.0.1"]

    def launched(command: list[str], project: str, *options: object) -> subprocess.Popen[str]:
        words = [*ranks, f"--main_process_port={free_port()}", *options]
        return start(command, *words, *digits(tmp_path / project), cwd=tmp_path)

    ours = ([*COMMAND, "launch"], "ours", "--ckpt_root", root)
    killed = launched(*ours)
    until(lambda: committed(root) >= 2 or killed.poll() is not None)
    workers = psutil.Process(killed.pid).children()
    for process in (psutil.Process(killed.pid), *workers):  # the launcher first, lest it ends them
        process.kill()
    output(killed, -9)
    assert len(workers) >= 2
    expected = weights(output(launched(STOCK, "stock"), 0)[0])
    out, err = output(launched(*ours), 0)
    assert "goes on in epoch" in out, err
    assert weights(out) == expected
    assert DIGITS.read_bytes() == before


def test_our_options_are_told_from_accelerates_and_from_the_scripts() -> None:
    words = [
        "--num_processes", "2", "--ckpt_root", "a b", "--cpu", "--ckpt-every=5", "train.py",
        "--ckpt_root", "its own",
    ]  # fmt: skip
    ours, theirs = take_ours(words, launch_command_parser())
    assert ours == {"root": "a b", "every": "5"}
    assert theirs == ["--num_processes", "2", "--cpu", "train.py", "--ckpt_root", "its own"]
    with pytest.raises(ConfigError, match="there is no option --ckpt_rot"):
        take_ours(["--ckpt_rot", "x"], launch_command_parser())


def test_a_bad_value_ends_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it was started')")
    for words, says in (
        (["--ckpt_keep", "some"], "not a retention rule"),
        (["--use_deepspeed"], "DeepSpeed"),
        (["--ckpt_config_file", "nowhere.yaml"], "nowhere.yaml cannot be read"),
    ):
        assert main(["launch", "--cpu", *words, str(script)]) == 2
        assert says in capsys.readouterr().err
        os.environ.pop("ACCELERATE_CKPT_KEEP", None)
        os.environ.pop("ACCELERATE_USE_CKPT", None)


def test_config_writes_a_section_and_env_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["s3://bucket/run7\n", "500\n", "\n", "\n", "\n"])
    monkeypatch.setattr("sys.stdin.readline", lambda: next(answers), raising=False)
    path = tmp_path / "ckpt.yaml"
    assert main(["config", "--config_file", str(path)]) == 0
    section = yaml.safe_load(path.read_text())["ckpt_config"]
    assert section == {"root": "s3://bucket/run7", "every": 500, "keep": "last=3", "resume": "auto"}
    assert f"--ckpt_config_file {path}" in capsys.readouterr().out
    for name in ("ROOT", "EVERY", "KEEP", "RESUME"):
        monkeypatch.setenv(f"ACCELERATE_CKPT_{name}", "")  # so that what `env` sets is undone
    assert main(["env", "--ckpt_config_file", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "ACCELERATE_CKPT_ROOT=s3://bucket/run7" in printed
    assert "ACCELERATE_CKPT_EVERY=500" in printed
    assert main([]) == 2
