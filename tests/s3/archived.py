"""A run on this machine whose archive is a bucket behind a fault proxy, and what holds for both.

Looks at the bucket past the proxy. Knows trainers, tiers and verification.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.crash.conftest import Start
from tests.crash.run import Trainer, await_end
from tests.s3.programs import train
from tests.s3.proxy import Proxy
from tests.s3.rules import Request
from tests.s3.servers import Server, options_for
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.verify import verify
from torch_ckpt.storage.store import Store, open_store

PATIENCE_S = 60.0


@dataclass
class Run:
    """One root, one archive."""

    root: Path
    server: Server
    proxy: Proxy
    prefix: str
    start_one: Start
    options: dict[str, Any] = field(default_factory=dict)
    trainers: list[Trainer] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"s3://{self.server.bucket}/{self.prefix}"

    def start(self, **options: Any) -> tuple[Trainer, dict[str, Any]]:
        """A trainer, and what it says of its resume."""
        through = {**options_for(self.proxy.url), **options.pop("request_options", {})}
        root = options.pop("root", self.root)
        merged = {"archive": self.url, "archive_options": through, "archive_codec": "raw"}
        merged |= {**self.options, **options}
        trainer = self.start_one(train, str(root), merged)
        self.trainers.append(trainer)
        return trainer, trainer.hear_dict()

    def train(self, *steps: int, **options: Any) -> dict[str, Any]:
        """A whole run that resumes, saves these steps and closes; what it said of its resume."""
        trainer, resumed = self.start(**options)
        for step in steps:
            assert ask(trainer, "save", step)["state"] == "committed"
        end(trainer)
        return resumed

    # What is there.

    @property
    def archive(self) -> Store:
        """Past the proxy."""
        return open_store(self.url, self.server.storage_options)

    def steps(self) -> list[int]:
        """In the archive."""
        return sorted(one.step for one in Catalog(self.archive).committed())

    def own_steps(self) -> list[int]:
        """In the root."""
        return sorted(one.step for one in Catalog(open_store(str(self.root))).committed())

    def assert_sound(self) -> None:
        """Whatever is committed anywhere can be read back whole."""
        for store in (self.archive, open_store(str(self.root))):
            committed, damaged = Catalog(store).scan()
            assert damaged == []
            for one in committed:
                report = verify(store, one)
                assert report.ok, (store.url, report.damages)

    def shards(self) -> dict[str, int]:
        """The shards that the bucket has whole, with their sizes."""
        store = self.archive
        return {
            f"{folder}/{entry.name}": entry.bytes
            for folder in store.folders()
            for entry in store.entries(folder)
            if entry.name.endswith((".safetensors", ".blocks"))
        }

    def sent(self, name: str, after: int = 0) -> int:
        """Bytes of an object's content that travelled, since a place in the log."""
        return sum(
            one.sent
            for one in self.requests(after)
            if one.method == "PUT" and one.key.endswith(name)
        )

    def requests(self, after: int = 0) -> list[Request]:
        """Those of this run's archive."""
        return self.proxy.log()[after:]

    def tidy(self) -> bool:
        """Whether no multipart upload is left."""
        return self.server.uploads(self.prefix) == []

    def await_writers(self) -> None:
        """Every writer of this run has ended."""
        for trainer in self.trainers:
            for pid in trainer.writers:
                await_end(pid)


def ask(trainer: Trainer, *wish: Any, timeout_s: float = PATIENCE_S + 10) -> dict[str, Any]:
    """Have a trainer do something; its answer."""
    trainer.say(wish)
    return trainer.hear_dict(timeout_s)


def end(trainer: Trainer) -> list[str]:
    """Close a trainer; what it has logged."""
    trainer.say(None)
    said = trainer.hear_dict()
    assert trainer.join() == 0
    return said["log"]


def until(holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait for something to come true."""
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


def kill(*pids: int) -> None:
    """SIGKILL, to processes that may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_over(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
