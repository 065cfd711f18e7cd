"""`accelerate-ckpt launch`: what `accelerate launch` does, with the engine under every save.

    accelerate-ckpt launch --config_file cluster.yaml --ckpt_root /lustre/run7 train.py --lr 1

Options that begin with `--ckpt_` are ours, `--ckpt_config_file` names a file with our section; the
rest is Accelerate's, whose own code parses it and starts the processes. They get our variables,
and start `accelerate_ckpt.run` with the script in the place of the script.

Knows Accelerate's launcher. Knows nothing of saving.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from accelerate_ckpt.plugin import GATE, PREFIX
from accelerate_ckpt.section import FIELDS, environment, read_document, read_section, split
from torch_ckpt import ConfigError

_OURS = ("config_file", *FIELDS)
_RUNNER = "accelerate_ckpt.run"


def launch(arguments: Sequence[str]) -> None:
    """Start a script under Accelerate, with checkpoints.

    Raises:
        ConfigError: an option or the configuration cannot be used; nothing was started.
    """
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import launch_command, launch_command_parser

    from accelerate_ckpt.version import check_version

    check_version()
    given, theirs = take_ours(arguments, launch_command_parser())
    parsed = launch_command_parser().parse_args(theirs)
    _refuse(parsed)
    variables: dict[str, str] = {}
    path = parsed.config_file or (default_config_file if not parsed.cpu else None)
    with contextlib.ExitStack() as ends:
        if path is not None and Path(path).is_file():
            rest, section = split(read_document(Path(path)))
            if section is not None:
                variables |= environment(section, where=f"ckpt_config of {path}")
                scratch = tempfile.TemporaryDirectory(prefix="accelerate-ckpt-")
                parsed.config_file = str(Path(ends.enter_context(scratch), "accelerate.yaml"))
                Path(parsed.config_file).write_text(yaml.safe_dump(rest), encoding="utf-8")
        own = given.pop("config_file", None)
        if own is not None:
            variables |= environment(read_section(Path(own)), where=own)
        variables |= {PREFIX + name.upper(): value for name, value in given.items()}
        os.environ.update({**variables, GATE: "true"})
        check_environment()
        script = ["-m", parsed.training_script] if parsed.module else [parsed.training_script]
        parsed.training_script_args = [*script, *parsed.training_script_args]
        parsed.training_script, parsed.module = _RUNNER, True
        launch_command(parsed)


def take_ours(arguments: Sequence[str], parser: Any) -> tuple[dict[str, str], list[str]]:
    """Our options among those before the script, and everything else.

    Raises:
        ConfigError: one of ours has no value, or there is none of that name.
    """
    ours: dict[str, str] = {}
    theirs: list[str] = []
    values = {
        word: action.nargs for action in parser._actions for word in action.option_strings
    }  # how many words follow an option of Accelerate's
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if name.startswith(("--ckpt_", "--ckpt-")):
            field = name.removeprefix("--ckpt").lstrip("-_").replace("-", "_")
            if field not in _OURS:
                known = ", ".join(f"--ckpt_{one}" for one in _OURS)
                raise ConfigError(f"there is no option {name}; there are {known}")
            if not equals:
                if not waiting:
                    raise ConfigError(f"{name} needs a value")
                value = waiting.pop(0)
            ours[field] = value
            continue
        theirs.append(word)
        if not name.startswith("-"):
            theirs += waiting  # the script, and all that is the script's
            break
        if not equals and values.get(name, 0) is None and waiting:
            theirs.append(waiting.pop(0))
    return ours, theirs


def check_environment() -> None:
    """Refuse variables that cannot be used, before anything is started.

    Raises:
        ConfigError: the message names the variable or the field.
    """
    from accelerate_ckpt.plugin import CheckpointPlugin

    known = {PREFIX + name.upper() for name in FIELDS}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            raise ConfigError(f"there is no variable {name}; there are {', '.join(sorted(known))}")
    CheckpointPlugin()


def _refuse(parsed: Any) -> None:
    for name, what in (
        ("use_deepspeed", "DeepSpeed"),
        ("use_megatron_lm", "Megatron-LM"),
        ("tpu", "TPUs"),
        ("no_python", "--no_python"),
    ):
        if getattr(parsed, name, False):
            raise ConfigError(
                f"accelerate-ckpt cannot attach under {what}; use accelerate launch, or take it out"
            )
