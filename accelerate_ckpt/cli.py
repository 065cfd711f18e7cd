"""The command line: `accelerate-ckpt launch`, `config` and `env`.

Knows words and prints. Knows nothing of what the commands do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from torch_ckpt import CkptError, ConfigError

_HELP = """usage: accelerate-ckpt COMMAND ...

  launch   takes what `accelerate launch` takes, and --ckpt_root, --ckpt_every, --ckpt_keep, ...;
           runs the script, unchanged, with the engine under save_state and load_state
  config   asks a few questions and writes the section ckpt_config
  env      prints what is in force
"""

_QUESTIONS = (
    ("root", "Folder or URL for this run's checkpoints", ""),
    ("every", "Save by itself after so many optimizer steps (0: only when the script asks)", "0"),
    ("keep", "Which to keep, such as last=3,every=1000, or all", "last=3"),
    ("archive", "Folder or URL of an archive (empty: none)", ""),
    ("resume", "Resume the newest by load_state() (auto or never)", "auto"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[[list[str]], None]] = {
        "launch": _launch,
        "config": _config,
        "env": _env,
    }
    if not words or words[0] not in commands:
        say = sys.stdout if words[:1] in (["-h"], ["--help"]) else sys.stderr
        say.write(_HELP)
        return 0 if say is sys.stdout else 2
    try:
        commands[words[0]](words[1:])
    except CkptError as error:
        sys.stderr.write(f"accelerate-ckpt: {error}\n")
        return 2
    return 0


def console() -> None:
    """The console script."""
    sys.exit(main())


def _launch(arguments: list[str]) -> None:
    from accelerate_ckpt.launch import launch

    launch(arguments)


def _config(arguments: list[str]) -> None:
    """Ask, and write the section into a file of Accelerate's or one of its own."""
    from accelerate_ckpt.section import KEY, environment, read_document

    path = Path(_one_option(arguments, "--config_file", "ckpt.yaml"))
    document: dict[str, Any] = read_document(path) if path.exists() else {}
    section = {}
    for name, question, usual in _QUESTIONS:
        answer = _ask(f"{question} [{usual}]: ") or usual
        if answer not in ("", "0"):
            section[name] = int(answer) if name == "every" and answer.isdigit() else answer
    environment(section, where="your answers")
    alone = not document or set(document) == {KEY}
    document[KEY] = section
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    option = f"--ckpt_config_file {path}" if alone else f"--config_file {path}"
    sys.stdout.write(f"wrote {path}; start with: accelerate-ckpt launch {option} script.py\n")
    if not alone:
        sys.stdout.write(
            "plain `accelerate launch` refuses this file now; it knows no ckpt_config\n"
        )


def _env(arguments: list[str]) -> None:
    """Print versions, the gate, and every field."""
    import accelerate

    import torch_ckpt
    from accelerate_ckpt.launch import check_environment
    from accelerate_ckpt.plugin import GATE, PREFIX, CheckpointPlugin
    from accelerate_ckpt.section import FIELDS, environment, read_section
    from accelerate_ckpt.version import TESTED

    own = _one_option(arguments, "--ckpt_config_file", "")
    if own:
        os.environ.update(environment(read_section(Path(own)), where=own))
    check_environment()
    plugin = CheckpointPlugin()
    tested = f"tested: {TESTED[0]} and newer, before {TESTED[1]}"
    lines = [
        f"torch-ckpt {torch_ckpt.__version__}, Accelerate {accelerate.__version__} ({tested})",
        f"{GATE}={os.environ.get(GATE, 'false')}",
    ]
    lines += [
        f"{PREFIX + name.upper()}={'' if (value := getattr(plugin, name)) is None else value}"
        for name in FIELDS
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _one_option(arguments: list[str], name: str, usual: str) -> str:
    if not arguments:
        return usual
    if len(arguments) == 2 and arguments[0] == name:
        return arguments[1]
    raise ConfigError(f"only {name} FILE is known here, got {' '.join(arguments)}")


def _ask(question: str) -> str:
    sys.stdout.write(question)
    sys.stdout.flush()
    return sys.stdin.readline().strip()
