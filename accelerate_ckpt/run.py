"""Run a script as `python` would, with checkpoints for every Accelerator that it makes.

    torchrun --nproc_per_node 2 -m accelerate_ckpt.run train.py --its options

The script is not changed and need not know: `Accelerator.__init__` of this process attaches.
`accelerate-ckpt launch` starts this module in the place of the script. Without
`ACCELERATE_USE_CKPT=true` it does nothing but run the script.

Knows how Python runs scripts. Knows nothing of checkpoints but `attach`.
"""

from __future__ import annotations

import runpy
import sys
import types
from functools import wraps
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from accelerate_ckpt.plugin import CheckpointPlugin, wanted

_USAGE = "usage: python -m accelerate_ckpt.run [-m MODULE | SCRIPT] [ARGUMENTS ...]"


def main() -> None:
    """Take what is to be run from `sys.argv`, and run it."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    if len(arguments) < 1 + as_module:
        raise SystemExit(_USAGE)
    if wanted():
        CheckpointPlugin.from_environment()  # a bad value ends the job here, not at the first save
        attach_all()
    if as_module:
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    path = Path(arguments[0])
    if path.is_dir() or path.suffix == ".zip":
        runpy.run_path(str(path), run_name="__main__")
        return
    _run_script(path)


def attach_all() -> None:
    """Have every Accelerator that this process makes attach itself; once is enough.

    Raises:
        ConfigError: this version of Accelerate is not served.
    """
    from accelerate import Accelerator

    from accelerate_ckpt.accelerator import attach
    from accelerate_ckpt.version import check_version

    check_version()
    made = Accelerator.__init__
    if hasattr(made, "_ckpt_attaches"):
        return

    @wraps(made)
    def attaching(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        attach(self)

    attaching._ckpt_attaches = True  # type: ignore[attr-defined]
    Accelerator.__init__ = attaching


def _run_script(path: Path) -> None:
    """Run a file as `__main__`, which it stays: workers and pickles look for its classes there."""
    sys.path[0] = str(path.resolve().parent)
    module = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", str(path))
    module.__file__, module.__loader__, module.__spec__ = str(path), loader, None
    sys.modules["__main__"] = module
    exec(loader.get_code("__main__"), module.__dict__)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
