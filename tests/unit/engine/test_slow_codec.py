"""A codec that is slower than the saves come does not stop them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from tests import chains
from torch_ckpt import Checkpointer, load_generation


def test_a_save_that_waited_for_encoding_is_stored_as_it_is_and_the_next_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.randn(1 << 20)
    with (
        caplog.at_level(logging.WARNING),
        Checkpointer(tmp_path, codec="zstd", keep=None) as checkpointer,
    ):
        checkpointer.save({"w": weight + 1}, 1).wait()
        pid = checkpointer.writer_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        checkpointer.save({"w": weight + 2}, 2)
        second = checkpointer.save({"w": weight + 3}, 3)  # both slabs are with the writer
        going_on = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
        going_on.start()
        late = checkpointer.save({"w": weight + 4}, 4)  # waits for a slab
        going_on.join()
        second.wait()
        late.wait()
        checkpointer.save({"w": weight + 5}, 5).wait()
    found = chains.by_step(tmp_path)
    used = {step: chains.codecs(tmp_path, one) for step, one in found.items()}
    assert used == {1: {"zstd"}, 2: {"zstd"}, 3: {"zstd"}, 4: {"raw"}, 5: {"zstd"}}
    assert sum("step 4 is not encoded" in line for line in caplog.messages) == 1
    for step in found:
        assert torch.equal(load_generation(str(tmp_path), step=step)["w"], weight + step)
