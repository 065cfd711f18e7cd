"""The command line `torch-ckpt`: finds the command, and turns its errors into one line and a code.

A command's module is imported when it is run, so that `torch-ckpt ls` never waits for torch.
Knows names of commands. Knows nothing of what they do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from typing import Any

import click

from torch_ckpt.cli.output import printable
from torch_ckpt.errors import CkptError, FormatError, IntegrityError

OK, DAMAGED_OR_DIFFERENT, NO_SUCH_THING = 0, 1, 2
INTERRUPTED, BROKEN_PIPE = 130, 141
"""128 and the signal, as a shell shows them."""

_COMMANDS = {
    "ls": ("ls", "List the generations of a run."),
    "show": ("show", "What is in one generation."),
    "verify": ("verify", "Compare every stored byte with its digest."),
    "prune": ("prune", "Delete generations that no rule keeps, or what crashes left."),
    "prefetch": ("prefetch", "Copy the newest generation into a local cache."),
    "tag": ("tag", "Give a generation a tag, such as permanent."),
    "untag": ("tag", "Take a tag away."),
    "export": ("export", "Write a generation as one safetensors file or Lightning checkpoint."),
    "import": ("import_", "Bring a DCP, Lightning or torch.save checkpoint into a run."),
    "diff": ("diff", "Which tensors and objects differ between two generations."),
}
"""Name, module, and help: the modules are not imported to print a list."""


class _ReaderGone(Exception):
    """Whoever read our output closed the pipe; click itself would end with code 1, damage."""


class _Commands(click.Group):
    """A group whose commands are imported by need."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise _ReaderGone from error
        return code

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"torch_ckpt.cli.{_COMMANDS[cmd_name][0]}")
        return getattr(module, f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from torch_ckpt import __version__  # only here: nothing else needs the package itself

        click.echo(f"torch-ckpt {__version__}")
        ctx.exit()


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version.",
)
@click.pass_context
def commands(context: click.Context) -> None:
    """Look at, check and look after checkpoints that torch-ckpt wrote.

    ROOT is the folder or URL of a run, or of one generation in it.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; its exit code. Errors of users and storage become one line."""
    try:
        code: Any = commands.main(
            None if arguments is None else list(arguments),
            prog_name="torch-ckpt",
            standalone_mode=False,
        )
    except _ReaderGone:
        # What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        return INTERRUPTED
    except click.ClickException as error:
        _say(_usage(error))
        return error.exit_code
    except (IntegrityError, FormatError) as error:
        _say(str(error))
        return DAMAGED_OR_DIFFERENT
    except OSError as error:
        _say(_os_error(error))
        return NO_SUCH_THING
    except CkptError as error:
        _say(str(error))
        return NO_SUCH_THING
    return code if isinstance(code, int) else OK


def main() -> None:
    """The entry point that packaging names."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a name may hold what the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(run())


def _say(message: str) -> None:
    print(f"torch-ckpt: {printable(' '.join(message.split()))}", file=sys.stderr)


def _usage(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    if isinstance(error, click.UsageError) and context is not None:
        return f"{message}; see `{context.command_path} --help`"
    return message


def _os_error(error: OSError) -> str:
    if error.strerror is None:
        return str(error)
    if isinstance(error, CkptError) or error.filename is None:
        return error.strerror
    return f"{error.filename}: {error.strerror}"


if __name__ == "__main__":
    main()
