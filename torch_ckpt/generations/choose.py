"""Which generation to start from, and which next if that one turns out to be damaged.

Pure: the same list in gives the same order on every rank. Steps, tags and parent links decide;
clocks are never asked. Knows manifests. Knows nothing of stores or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_ckpt.generations.catalog import Generation, newest_first


def choose(generations: Sequence[Generation], step: int | None = None) -> list[Generation]:
    """The candidates, best first: of all steps, or of one step that was asked for.

    Newest step first. Of several at one step, first the one that the newest generation descends
    from, then by name. What is damaged or set aside, or builds on what is damaged or gone, is a
    candidate only where its step was asked for, and what is set apart after the others.
    """
    if step is None:
        broken = lacking(generations)
        usable = [one for one in generations if not one.set_apart and one.folder not in broken]
    else:
        usable = [one for one in generations if one.step == step]
    line = _line_of_newest([one for one in generations if not one.set_apart])
    return sorted(
        usable, key=lambda one: (-one.step, one.set_apart, one.id not in line, one.folder)
    )


def lacking(generations: Sequence[Generation]) -> dict[str, str]:
    """Folders of generations that build on what is damaged or not there, and on which step."""
    damaged = {one.step for one in generations if "damaged" in one.tags}
    sound = {one.step for one in generations if "damaged" not in one.tags}
    return {
        one.folder: f"it builds on step {base}, which is "
        + ("damaged" if base in damaged else "gone")
        for one in generations
        for base in one.manifest.bases
        if base not in sound
    }


def _line_of_newest(generations: Sequence[Generation]) -> set[tuple[int, str]]:
    """The ids of the newest generation and its ancestors."""
    parents = {one.id: one.manifest.parent for one in generations}
    line: set[tuple[int, str]] = set()
    if not generations:
        return line
    current = min(generations, key=newest_first).id
    while current not in line:  # a planted circle ends too
        line.add(current)
        parent = parents.get(current)
        if parent is None:
            break
        current = (parent["step"], parent["attempt"])
    return line
