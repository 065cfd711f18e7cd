"""A trainer in a process of its own, started in milliseconds, that does as it is told.

Processes are forked from a server that has torch loaded already, so a test may kill many of them.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch_ckpt.checkpointer"])


class TrainerProcess:
    """Holds a checkpointer and a state of one tensor and one number."""

    def __init__(self, root: str, **options: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_train, args=(theirs, root, options), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, what: str, *args: Any) -> Any:
        """Do something there; its result, or its exception raised here."""
        self._pipe.send((what, args))
        if not self._pipe.poll(120):
            raise TimeoutError(f"the trainer did not answer to {what}")
        result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def kill(self) -> None:
        """SIGKILL, without a word."""
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def close(self) -> None:
        """An orderly end."""
        self.call("close")
        self.process.join()
        self._pipe.close()


def _train(pipe: Connection, root: str, options: dict[str, Any]) -> None:
    import torch

    from torch_ckpt import CkptError
    from torch_ckpt.checkpointer import Checkpointer

    torch.set_num_threads(1)
    checkpointer = Checkpointer(root, **options)
    state = {"v": torch.zeros(1000), "step": 0}
    while True:
        what, args = pipe.recv()
        try:
            if what == "save":
                step, block = args
                state["v"].fill_(step)
                state["step"] = step
                pending = checkpointer.save(state, step, block=block)
                result: Any = pending.state
            elif what == "resume":
                generation = checkpointer.resume(state)
                result = generation and (
                    generation.step,
                    state["step"],
                    state["v"].unique().tolist(),
                )
            elif what == "writer":
                result = checkpointer.writer_pid
            else:
                result = getattr(checkpointer, what)(*args)
        except CkptError as error:
            result = error
        pipe.send(result)
        if what == "close":
            return
