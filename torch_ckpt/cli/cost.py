"""What the generations that stay cost a month in each tier.

Knows prices and bytes. Knows nothing of rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import click

from torch_ckpt.cli.output import counted, number, print_line, size
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.tiers import TierName

GB = 10**9
Prices = Mapping[str, float]
_PLAIN = ""
"""Stands for the tier of a price that names none, until the tiers are known."""


def _prices(
    _context: click.Context, _parameter: click.Parameter, words: tuple[str, ...]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for word in (part for text in words for part in text.split(",")):
        tier, equals, price = word.rpartition("=")
        if equals and tier not in get_args(TierName):
            raise click.BadParameter(f"{tier!r} is no tier; there are cache, primary and archive")
        try:
            found[tier] = float(price)
        except ValueError:
            found[tier] = math.nan
        if not 0 <= found[tier] < math.inf:
            raise click.BadParameter(f"{word!r} is no price, such as 0.023 or primary=0.14")
    return found


cost_option = click.option(
    "--cost",
    "prices",
    multiple=True,
    metavar="[TIER=]DOLLARS",
    callback=_prices,
    help="Dollars a GB and month, of the archive unless TIER says otherwise. May be repeated.",
)


def costs(
    prices: Prices, kept: Mapping[str, Sequence[Generation]], *, archive: bool
) -> dict[str, dict[str, Any]]:
    """What stays in each tier that has a price, and what it costs."""
    plain: TierName = "archive" if archive else "primary"
    known = {tier or plain: price for tier, price in prices.items()}
    found = {}
    for tier, generations in kept.items():
        if tier in known:
            total = sum(one.stored_bytes for one in generations)
            found[tier] = {
                "generations": len(generations),
                "bytes": total,
                "dollars_a_month": total / GB * known[tier],
            }
    return found


def print_costs(found: Mapping[str, Mapping[str, Any]]) -> None:
    """A line for each tier, and one for all."""
    for tier, facts in found.items():
        what = f"{counted(facts['generations'], 'generation')}, {size(facts['bytes'])}"
        print_line(f"{tier}: {what} stay, {_dollars(facts['dollars_a_month'])} a month")
    if len(found) > 1:
        total = sum(facts["dollars_a_month"] for facts in found.values())
        print_line(f"in all: {_dollars(total)} a month")


def _dollars(amount: float) -> str:
    return f"${amount:.2f}" if amount >= 0.01 or amount == 0 else f"${number(amount)}"
