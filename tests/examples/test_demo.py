"""The demo does what it says, on a terminal of 80 columns and when piped, and leaves nothing."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import psutil
import pytest

from tests.examples.running import EXAMPLES, output, start, until

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ANSWERS = ("weights", "optimizer state", "random state", "order of samples")


def check_report(text: str) -> None:
    for name in ANSWERS:
        assert re.search(rf"^{name} +yes$", text, re.MULTILINE), text
    assert re.search(r"^blocked per save +[\d.]+ ms median, [\d.]+ ms max$", text, re.MULTILINE)
    lost = re.search(r"^steps lost +(\d+)(?:, trained again)?$", text, re.MULTILINE)
    killed = re.search(r"SIGKILL in step (\d+), ", text)
    resumed = re.search(r"by the same command, after step (\d+)$", text, re.MULTILINE)
    assert lost is not None, text
    assert killed is not None, text
    assert resumed is not None, text
    assert int(killed[1]) - int(resumed[1]) == int(lost[1])


def on_terminal(folder: Path, *arguments: str, columns: int = 80) -> tuple[int, str]:
    """Run the demo on a terminal; its exit code and everything that the terminal was sent."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    env |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "demo.py"), *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = bytearray()
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:  # how Linux says that nobody holds the other side any more
        pass
    finally:
        os.close(ours)
    return process.wait(), shown.decode()


@pytest.mark.slow
def test_small_demo_on_a_terminal_reports_that_everything_is_equal(tmp_path: Path) -> None:
    code, shown = on_terminal(tmp_path, "--steps", "24", "--save-every", "3", "--seed", "3")
    plain = ESCAPE.sub("", shown)
    assert code == 0, plain
    assert "train, until SIGKILL" in plain
    assert max(map(len, re.split(r"[\r\n]+", plain))) <= 80
    check_report(plain.replace("\r", ""))
    assert not (tmp_path / "demo-run").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_in_full_size_prints_the_report_and_nothing_else(tmp_path: Path) -> None:
    out, err = output(start("demo.py", "--keep", cwd=tmp_path), 0, timeout_s=840)
    assert err == ""
    assert not ESCAPE.search(out)
    assert max(map(len, out.splitlines())) <= 80
    assert all(line == line.rstrip() for line in out.splitlines())
    check_report(out)
    for run in ("killed", "whole"):
        assert (tmp_path / "demo-run" / run / "stderr.txt").read_text() == ""


def test_job_that_fails_is_quoted(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "lightning.py").write_text("raise RuntimeError('this Lightning is broken')\n")
    out, err = output(start("demo.py", cwd=tmp_path, env={"PYTHONPATH": str(broken)}), 2)
    assert out == "train, until SIGKILL ...\n"
    assert err.startswith("demo: the training job ended with exit code 1:\n")
    assert err.endswith("RuntimeError: this Lightning is broken\n")


def test_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "demo-run" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    out, err = output(start("demo.py", cwd=tmp_path), 2)
    assert out == ""
    assert err == (
        "demo: demo-run was not made by this demo; move it away, or run in another folder\n"
    )
    assert precious.read_text() == "years of work"


@pytest.mark.slow
def test_demo_that_is_told_to_end_takes_its_job_with_it(tmp_path: Path) -> None:
    demo = start("demo.py", "--save-every", "2", cwd=tmp_path)
    checkpoints = tmp_path / "demo-run" / "killed" / "checkpoints"
    until(lambda: list(checkpoints.glob("*/manifest.json")) or demo.poll() is not None)
    started = psutil.Process(demo.pid).children(recursive=True)
    assert len(started) >= 2, "the job and its writer"

    second = start("demo.py", cwd=tmp_path)
    _, err = output(second, 2)
    assert err.startswith("demo: another demo is running in ")

    demo.send_signal(signal.SIGTERM)
    output(demo, 143)
    until(lambda: not any(process.is_running() for process in started), timeout_s=30)


@pytest.mark.parametrize(
    "arguments", [("--steps", "10", "--save-every", "5"), ("--save-every", "0")]
)
def test_too_short_a_run_is_refused_at_once(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    _, err = output(start("demo.py", *arguments, cwd=tmp_path), 2)
    assert "--steps must be at least five times --save-every" in err
    assert not (tmp_path / "demo-run").exists()
