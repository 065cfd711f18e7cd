"""From DCP's flat names back to the nested state that was saved.

Knows what DCP does to keys: each key of a dict becomes text, and empty dicts are left out. Knows
nothing of what the values are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_ckpt.errors import FormatError

_MAX_DEPTH = 100
_MAX_MISSING = 10_000


class _Node(dict[Any, Any]):
    """A container under construction: keys are texts for a dict, or numbers for a list."""


def nested(
    leaves: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]], where: str
) -> dict[Any, Any]:
    """The state whose leaves lie at `paths`.

    Raises:
        FormatError: two of them claim one place, or a list has keys.
    """
    root = _Node()
    for name, path in paths.items():
        if len(path) > _MAX_DEPTH:
            raise FormatError(file=where, reason=f"{name[:80]!r} is nested too deeply")
        node = root
        for key in path[:-1]:
            inner = node.setdefault(key, _Node())
            if type(inner) is not _Node:
                raise FormatError(file=where, reason=f"{name!r} lies inside a value")
            node = inner
        if path[-1] in node:
            raise FormatError(file=where, reason=f"{name!r} lies where another value is")
        node[path[-1]] = leaves[name]
    return {key: _built(value, where) for key, value in root.items()}


def _built(value: Any, where: str) -> Any:
    if type(value) is not _Node:
        return value
    numbers = [key for key in value if type(key) is int]
    if not numbers:
        return _numbered({key: _built(item, where) for key, item in value.items()})
    if len(numbers) < len(value):
        raise FormatError(file=where, reason=f"a list that has keys: {list(value)!r:.80}")
    if max(numbers) + 1 - len(numbers) > _MAX_MISSING:
        raise FormatError(file=where, reason=f"a list of which only {len(numbers)} items are there")
    # Empty dicts are all that DCP leaves out of a list.
    return [_built(value.get(index, _Node()), where) for index in range(max(numbers) + 1)]


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """The same, with the state of an optimizer under numbers where its groups say so.

    DCP turned them into text, under which `load_state_dict` of an optimizer would not find them.
    """
    groups, slots = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or type(slots) is not dict:
        return state
    params = [group.get("params") for group in groups if isinstance(group, dict)]
    numbers = {
        str(number): number
        for listed in params
        if isinstance(listed, list)
        for number in listed
        if type(number) is int
    }
    if slots and slots.keys() <= numbers.keys():
        state["state"] = {numbers[key]: slot for key, slot in slots.items()}
    return state
