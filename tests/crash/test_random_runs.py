"""Whatever a run goes through, resume gives the newest generation that was promised."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.suites.trainer_process import TrainerProcess
from torch_ckpt import KeepLast, SaveFailed
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.storage.store import open_store


class RandomRun(RuleBasedStateMachine):
    """Saves, kills of trainer and writer, damage and resumes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp(prefix="random-run-")
        self.trainer: TrainerProcess | None = None
        self.step = 0
        self.sure: set[int] = set()
        """Steps that were reported committed and are not damaged."""
        self.promised: set[int] = set()
        """Steps that the writer has, and that it commits even if the trainer dies."""
        self.possible: set[int] = set()
        """Steps that may be there or not: their writer was killed."""
        self.start()

    def start(self) -> None:
        self.trainer = TrainerProcess(self.root, keep=KeepLast(2))
        self.check_resume()

    def call(self, what: str, *args: object) -> object:
        assert self.trainer is not None
        return self.trainer.call(what, *args)

    @rule(block=st.sampled_from(["copied", "staged", "committed"]))
    def save(self, block: str) -> None:
        self.step += 1
        try:
            self.call("save", self.step, block)
        except SaveFailed:
            self.possible.add(self.step)
            return
        (self.sure if block == "committed" else self.promised).add(self.step)

    @rule()
    def wait(self) -> None:
        try:
            self.call("wait")
        except SaveFailed:
            self.possible |= self.promised
        else:
            self.sure |= self.promised
        self.promised = set()

    @rule()
    def kill_writer(self) -> None:
        pid = self.call("writer")
        if isinstance(pid, int):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            # Until the trainer has noticed, a save may still go to the dead one and fail later.
            deadline = time.monotonic() + 10
            while self.call("writer") == pid and time.monotonic() < deadline:
                time.sleep(0.01)
            self.possible |= self.promised
            self.promised = set()

    @rule()
    def kill_trainer_and_start_again(self) -> None:
        assert self.trainer is not None
        self.trainer.kill()
        self.start()

    @precondition(lambda self: self.sure and not self.promised and not self.possible)
    @rule()
    def damage_the_newest(self) -> None:
        committed = Catalog(open_store(self.root)).committed()
        newest = committed[0]
        # Retention counts what nobody has found damaged yet, so a second good one must be there.
        good = {one.step for one in committed if not one.tags} & self.sure
        if newest.step != max(self.sure) or newest.tags or len(good) < 2:
            return
        shard = next(Path(newest.url).glob("*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        self.sure.remove(newest.step)

    @rule()
    def check_resume(self) -> None:
        found = self.call("resume")
        must = max([0, *self.sure, *self.promised])
        if found is None:
            assert must == 0
            return
        assert isinstance(found, tuple)
        step, number, values = found
        assert step >= must
        assert step in {*self.sure, *self.promised, *self.possible}
        assert (number, values) == (step, [float(step)])
        self.sure.add(step)
        self.promised, self.possible = set(), set()
        self.step = max(self.step, step)

    def teardown(self) -> None:
        if self.trainer is not None:
            with contextlib.suppress(SaveFailed):
                self.trainer.close()
            self.trainer.process.join(30)
        shutil.rmtree(self.root)


TestRandomRuns = RandomRun.TestCase
TestRandomRuns.settings = settings(
    max_examples=int(os.environ.get("TORCH_CKPT_RANDOM_RUNS", "12")),
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # every try starts processes: shrinking takes too long
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
