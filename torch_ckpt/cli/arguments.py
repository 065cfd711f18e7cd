"""The arguments and options that commands share.

Knows click. Knows nothing of storage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

root_argument = click.argument("root")
step_argument = click.argument("step", required=False, type=click.IntRange(min=0))
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def _options(
    _context: click.Context, _parameter: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value  # plain text needs no quotes
    return options


storage_option = click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_options,
    help="Passed to the fsspec file system of a URL; VALUE is text or JSON. May be repeated.",
)


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where to look beside ROOT, and how to open all of it."""

    archive: str | None = None
    cache: str | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """Of ROOT."""
    archive_options: Mapping[str, Any] = field(default_factory=dict)


def tier_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that looks at a run: its tiers, as `where`."""

    @wraps(command)
    def call(
        *arguments: Any,
        archive: str | None,
        cache: str | None,
        storage_options: Mapping[str, Any],
        archive_options: Mapping[str, Any],
        **options: Any,
    ) -> Any:
        where = Where(
            archive=archive,
            cache=cache,
            storage_options=storage_options,
            archive_options=archive_options,
        )
        return command(*arguments, where=where, **options)

    options = (
        click.option("--archive", metavar="URL", help="The run's archive: look there, too."),
        click.option("--cache", metavar="PATH", help="The run's cache on this node: look there."),
        storage_option,
        click.option(
            "--archive-option",
            "archive_options",
            multiple=True,
            metavar="KEY=VALUE",
            callback=_options,
            help="As --storage-option, for the archive.",
        ),
    )
    decorated: Callable[..., Any] = call
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def split_step(words: tuple[str, ...], last: str) -> tuple[int | None, str]:
    """`[STEP] LAST` as given after ROOT: click itself cannot leave out an argument in between.

    Raises:
        UsageError: there are too few, too many, or the step is not one.
    """
    if len(words) not in (1, 2):
        raise click.UsageError(
            f"give ROOT [STEP] {last}, which is {last} and at most a step after ROOT",
            click.get_current_context(),
        )
    if len(words) == 1:
        return None, words[0]
    return parse_step(words[0]), words[1]


def parse_step(text: str) -> int:
    """A step as given on the command line.

    Raises:
        UsageError: it is not a whole number from 0 up.
    """
    if not (text.isascii() and text.isdigit()):
        raise click.UsageError(
            f"{text!r} is no step, which is a whole number; a folder is given as part of ROOT",
            click.get_current_context(),
        )
    return int(text)
