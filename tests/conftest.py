"""Every test starts from the same seeds and leaves nothing behind.

The leak guard looks, after each test and its fixtures, for child processes, files in /dev/shm and
listening ports that were not there before; at the end of the session it looks for processes that
outlived their parents. It knows the operating system only, nothing of the engine.
"""

from __future__ import annotations

import gc
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import settings

SHM = Path("/dev/shm")
GRACE_S = 5.0
"""How long what a test has already told to end may take to be gone."""

MARK = "TORCH_CKPT_TEST_SESSION"
STAY = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager")
"""Helpers that the standard library and torch keep for the life of the process."""

settings.register_profile("torch-ckpt", deadline=None)  # two shared cores: no test is on time
settings.load_profile("torch-ckpt")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = uuid.uuid4().hex
    # For the processes that tests start; threads that spin while they wait take a busy machine's
    # cores from those that they wait for.
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Fixed random state of python, numpy and torch."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """Fail a test that leaves a child process, a file in /dev/shm or a listening port."""
    before = {name: look() for name, look in WATCHED.items()}
    yield
    left = {name: look() - before[name] for name, look in WATCHED.items()}
    if any(left.values()):
        left = _left_after_grace(before)
    if any(left.values()):
        pytest.fail(
            "the test left behind: "
            + "; ".join(
                f"{name} {', '.join(sorted(found))}" for name, found in left.items() if found
            ),
            pytrace=False,
        )


def _left_after_grace(before: dict[str, set[str]]) -> dict[str, set[str]]:
    gc.collect()  # DataLoader iterators and gloo groups in reference cycles still hold theirs
    deadline = time.monotonic() + GRACE_S
    while True:
        left = {name: look() - before[name] for name, look in WATCHED.items()}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _children() -> set[str]:
    """Live children of this process, by pid and command line; the dead are no leak."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:  # the thread has ended; its children moved to another one
            continue
        found.update(filter(None, map(_describe, map(int, pids))))
    return found


def _describe(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline()) or process.name()
    except psutil.Error:  # gone, or a zombie
        return None
    return None if any(name in command for name in STAY) else f"{pid} `{command[:160]}`"


def _shared_memory() -> set[str]:
    if "PYTEST_XDIST_WORKER" in os.environ or not SHM.is_dir():
        return set()  # the folder is shared with the tests beside this one
    return {name for name in os.listdir(SHM) if not _strange(name)}


def _strange(name: str) -> bool:
    """Whether a file in shared memory is certainly not ours: others may use this machine too."""
    if name.startswith("sem.mp-"):  # unlinked by multiprocessing as soon as it is open
        return True
    maker = re.match(r"torch_([0-9]+)_", name)
    if maker is None or not psutil.pid_exists(int(maker[1])):
        return False
    try:
        return psutil.Process(int(maker[1])).environ().get(MARK) != os.environ[MARK]
    except psutil.Error:
        return False


def _ports() -> set[str]:
    try:
        sockets = psutil.Process().net_connections(kind="inet")
    except psutil.AccessDenied:
        return set()
    return {f"{s.laddr.ip}:{s.laddr.port}" for s in sockets if s.status == psutil.CONN_LISTEN}


WATCHED: dict[str, Callable[[], set[str]]] = {
    "child process": _children,
    "file in /dev/shm": _shared_memory,
    "listening port": _ports,
}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session whose tests left processes that no longer are children of anyone here."""
    deadline = time.monotonic() + GRACE_S
    while (left := _marked()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\nprocesses outlived the tests: {', '.join(left)}", red=True)


def _marked() -> list[str]:
    """Processes that inherited this session's mark, apart from this one."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes():
                found.append(_describe(int(entry.name)))
        except OSError:  # it ended meanwhile, or belongs to someone else
            continue
    return [described for described in found if described]
