"""`torch-ckpt diff`: which tensors and objects differ between two generations.

Knows arguments and what differences look like. Knows nothing of how tensors are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from torch_ckpt.cli.arguments import Where, json_option, tier_options
from torch_ckpt.cli.output import counted, number, print_json, print_line, print_table
from torch_ckpt.cli.places import split_spec
from torch_ckpt.cli.tiers import Found, open_tiers

_SIDES = {"a": "only in A", "b": "only in B"}


@click.command()
@click.argument("a")
@click.argument("b")
@json_option
@tier_options
def diff(a: str, b: str, *, as_json: bool, where: Where) -> int:
    """Compare two generations bit by bit; code 1 if they differ.

    A and B are folders of generations, or ROOT@STEP, or ROOT for the one to resume from.
    abs is the largest |A-B|, rel the largest |A-B| / max(|A|, |B|), count the elements that
    differ in any bit.
    """
    left, right = _open(a, where), _open(b, where)
    # Here: torch takes seconds to import, which `--help` and a wrong path must not cost.
    from torch_ckpt.cli.compare import compare
    from torch_ckpt.load import Opened

    found = compare(Opened(left.store, left.generation), Opened(right.store, right.generation))
    if as_json:
        print_json(
            {
                "a": {"url": left.generation.url, "step": left.generation.step},
                "b": {"url": right.generation.url, "step": right.generation.step},
                "equal": found.equal,
                "tensors_compared": found.tensors_compared,
                "objects_compared": found.objects_compared,
                "tensors": found.tensors,
                "objects": found.objects,
            }
        )
    else:
        _print(found.tensors, found.objects)
        print_line(
            f"{counted(found.tensors_compared, 'tensor')} and "
            f"{counted(found.objects_compared, 'object')} compared: "
            + ("all equal" if found.equal else f"{len(found.tensors) + len(found.objects)} differ")
        )
    return 0 if found.equal else 1


def _open(spec: str, where: Where) -> Found:
    root, step = split_spec(spec)
    return open_tiers(root, where, same_is_fine=True).pick(step)


def _print(tensors: Sequence[Mapping[str, Any]], objects: Sequence[Mapping[str, Any]]) -> None:
    if tensors:
        rows = [
            [
                one["name"],
                _SIDES.get(one["only_in"]) or one["reason"],
                "" if one["max_abs"] is None else number(one["max_abs"]),
                "" if one["max_rel"] is None else number(one["max_rel"]),
                "" if one["count"] is None else f"{one['count']}/{one['elements']}",
            ]
            for one in tensors
        ]
        columns = ("tensor", "difference", "abs", "rel", "count")
        print_table(columns, rows, right=("abs", "rel", "count"))
    if objects:
        rows = [
            [
                one["path"] or "state",
                _SIDES.get(one["only_in"]) or "values",
                one["a"] or "",
                one["b"] or "",
            ]
            for one in objects
        ]
        print_table(("object", "difference", "A", "B"), rows)
