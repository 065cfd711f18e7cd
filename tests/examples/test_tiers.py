"""The example with three tiers does what it says, and leaves nothing behind."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.examples.running import output, start, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ANSWERS = ("weights", "optimizer state", "random state", "order of samples")


def test_a_run_that_lost_its_folder_and_its_cache_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    arguments = ("--steps", 40, "--save-every", 6, "--seed", 3)
    out, err = output(start("tiers.py", *arguments, cwd=tmp_path), 0, timeout_s=840)
    assert err == ""
    for name in ANSWERS:
        assert re.search(rf"^{name} +yes$", out, re.MULTILINE), out
    killed = re.search(r"SIGKILL in step (\d+) ", out)
    resumed = re.search(r"after step (\d+), from the archive; first step", out)
    lost = re.search(r"^steps lost +(\d+), trained again$", out, re.MULTILINE)
    assert killed is not None, out
    assert resumed is not None, out
    assert lost is not None, out
    assert int(killed[1]) - int(resumed[1]) == int(lost[1])
    assert re.search(r"^generations now +cache 1, primary 3, archive 7$", out, re.MULTILINE), out
    assert max(map(len, out.splitlines())) <= 80
    assert not (tmp_path / "tiers-run").exists()


def test_an_example_that_is_killed_takes_its_server_with_it(tmp_path: Path) -> None:
    example = start("tiers.py", cwd=tmp_path)
    until(lambda: list(tmp_path.glob("tiers-run/killed")) or example.poll() is not None)
    started = psutil.Process(example.pid).children(recursive=True)
    (server,) = [one for one in started if "ThreadedMotoServer" in " ".join(one.cmdline())]
    others = [one for one in started if one != server]
    example.send_signal(signal.SIGKILL)
    output(example, -9)
    until(lambda: not _runs(server), timeout_s=30)
    for one in others:  # a job goes on without whoever started it, as jobs should
        one.kill()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
