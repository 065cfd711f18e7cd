"""A trainer whose moments are copied as codes, and what a reader should get of them.

Knows the public surface of the engine.
"""

from __future__ import annotations

import os
import signal

from tests.crash.programs import Logged
from tests.crash.run import Inside
from tests.moments import Run, as_device, digests
from torch_ckpt import Checkpointer
from torch_ckpt.errors import CkptError

SHAPE = (2048, 1024)


def stage(inside: Inside, root: str) -> None:
    """Commit step 1, then stage step 2 for a writer that is stopped, and wait for the end."""
    Logged()
    as_device()
    run = Run(shape=SHAPE)
    saver = Checkpointer(root, moments="fp8", keep=None)
    run.save(saver, 1).wait(timeout_s=60)
    writer = saver.writer_pid
    assert writer is not None
    inside.say({"writer": writer})
    os.kill(writer, signal.SIGSTOP)
    pending = run.save(saver, 2)
    pending.wait("staged", timeout_s=60)
    inside.say({"copied": pending.copied, "bytes": pending.bytes, "digests": digests(run, 2)})
    inside.hear()


def train(inside: Inside, root: str) -> None:
    """Save the steps that the test asks for; it hears of each as soon as the writer has it."""
    Logged()
    as_device()
    run = Run(shape=SHAPE)
    with Checkpointer(root, moments="fp8", keep=None, on_error="log") as saver:
        while (step := inside.hear()) is not None:
            pending = run.save(saver, step)
            pending.wait("staged", timeout_s=60)
            inside.say({"writer": saver.writer_pid, "quantised": pending.copied < pending.bytes})
            inside.hear()
            try:
                pending.wait(timeout_s=60)
            except CkptError as error:
                saver_said = str(error)
            else:
                saver_said = ""
            inside.say({"state": pending.state, "said": saver_said, "digests": digests(run, step)})
        try:
            saver.wait(timeout_s=60)
        except CkptError:
            return
