"""Carry out a retention rule: delete what it drops, and nothing else.

Runs after a commit, never before. Knows the catalog and rules. Knows nothing of saves in progress.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.index import forget
from torch_ckpt.generations.litter import sweep_deleted
from torch_ckpt.generations.retention import Retention, Verdict
from torch_ckpt.manifest.layout import step_of_folder

logger = logging.getLogger(__name__)


Pinned = Callable[[Generation], "str | None"]
"""Why a generation must stay though no rule keeps it, in words for a person; None if it may go."""


def prune(
    catalog: Catalog,
    keep: Retention,
    *,
    run: str | None,
    dry_run: bool = False,
    pinned: Pinned | None = None,
    elsewhere: Callable[[Generation], bool] = lambda one: False,
    over: Callable[[tuple[int, str]], bool] = lambda key: False,
) -> list[Verdict]:
    """Delete every generation that `keep` drops and no kept one needs; say why, newest first.

    With a `run`, the generations of other runs under the same root neither count nor go. `pinned`
    is asked about each one that the rule drops, before anything is deleted; what it pins stays
    with all its bases. What is permanent and `elsewhere` too, in a tier that keeps it, counts here
    as any other. `over` says of a generation that was committed once whether nobody brings it
    here any more: then what a prune that was killed has left of it goes, too.
    """
    committed, _, bare = catalog.everything()
    pins = _Pins(pinned)
    judge = partial(_judged, keep=keep, run=run, pins=pins, elsewhere=elsewhere)
    ordered = judge(committed)
    # An index may not know the latest tags, and nothing is deleted by hearsay.
    while hearsay := {v.generation.folder for v in ordered if not v.kept and v.generation.indexed}:
        now = catalog.read(hearsay)
        read = [now.get(one.folder) if one.folder in hearsay else one for one in committed]
        committed = [one for one in read if one is not None]
        ordered = judge(committed)
    doomed = [verdict for verdict in ordered if not verdict.kept]
    if not dry_run:
        forget(catalog.store, {verdict.generation.folder for verdict in doomed})
        # Oldest first: stopped half-way, what is left is what a rule would have kept anyway.
        for verdict in _needing_first(list(reversed(doomed))):
            catalog.delete(verdict.generation)
            logger.info("pruned %s: %s", verdict.generation.folder, verdict.reason)
        for folder, attempts in _half_deleted(committed, bare, run, over).items():
            swept = sweep_deleted(catalog.store, folder, attempts)
            logger.info("removed %d files that an earlier prune left in %s", len(swept), folder)
    return ordered


def _half_deleted(
    committed: Sequence[Generation],
    bare: Sequence[str],
    run: str | None,
    over: Callable[[tuple[int, str]], bool],
) -> dict[str, set[str]]:
    """Folders without a manifest in which generations were that were committed, and their attempts.

    Only what is committed becomes a parent. Nothing newer than what a run has committed counts:
    it may be saving into such a folder just now.
    """
    mine = [one for one in committed if run is None or one.manifest.run == run]
    newest = max((one.step for one in mine if not one.set_apart), default=0)
    there = {one.id for one in committed}
    attempts: dict[int, set[str]] = {}
    for one in mine:
        if (parent := one.manifest.parent) is not None and parent["step"] < newest:
            key = parent["step"], parent["attempt"]
            if key not in there and over(key):
                attempts.setdefault(key[0], set()).add(key[1])
    steps = {folder: step_of_folder(folder) for folder in bare}
    return {name: attempts[step] for name, step in steps.items() if step in attempts}


class _Pins:
    """Answers of `pinned`, which may cost requests: each generation is asked about once."""

    def __init__(self, pinned: Pinned | None) -> None:
        self._pinned = pinned
        self._known: dict[tuple[str, str], str | None] = {}

    def apply(self, verdict: Verdict) -> Verdict:
        if verdict.kept or self._pinned is None:
            return verdict
        one = verdict.generation
        name = one.folder, one.manifest.attempt
        if name not in self._known:
            self._known[name] = self._pinned(one)
        reason = self._known[name]
        return verdict if reason is None else replace(verdict, kept=True, reason=reason)


def _judged(
    committed: Sequence[Generation],
    *,
    keep: Retention,
    run: str | None,
    pins: _Pins,
    elsewhere: Callable[[Generation], bool],
) -> list[Verdict]:
    mine = [
        _mortal(one) if elsewhere(one) else one
        for one in committed
        if run is None or one.manifest.run == run
    ]
    verdicts = {v.generation.folder: v for v in keep.judge(mine)}
    for one in committed:
        stranger = Verdict(generation=one, kept=True, reason=f"belongs to run {one.manifest.run}")
        verdicts.setdefault(one.folder, stranger)
    ordered = [pins.apply(verdicts[one.folder]) for one in committed]
    needed = base_steps([v.generation for v in ordered if v.kept], committed)
    return [_needed(verdict, needed) for verdict in ordered]


def base_steps(kept: Sequence[Generation], committed: Sequence[Generation]) -> dict[int, int]:
    """Every step that the kept generations need, through whole chains, and which one needs it."""
    bases: dict[int, set[int]] = {}
    for one in committed:
        bases.setdefault(one.step, set()).update(one.manifest.bases)
    needed: dict[int, int] = {}
    pending = deque((base, one.step) for one in kept for base in one.manifest.bases)
    while pending:
        base, needed_by = pending.popleft()  # a kept one is a better reason than a needed one
        if base not in needed:
            needed[base] = needed_by
            pending += [(further, base) for further in bases.get(base, ())]
    return needed


def lending(committed: Sequence[Generation]) -> set[str]:
    """The folders of generations on which others build: never one that a user has named."""
    needed = {step for one in committed for step in one.manifest.bases}
    return {
        one.folder
        for one in committed
        if one.step in needed and step_of_folder(one.folder) is not None
    }


def delete_unlent(catalog: Catalog, generation: Generation) -> bool:
    """Delete a generation unless others build on it; whether it is gone."""
    if generation.folder in lending(catalog.committed()):
        return False
    forget(catalog.store, [generation.folder])
    catalog.delete(generation)
    return True


def _needing_first(doomed: Sequence[Verdict]) -> list[Verdict]:
    """The same order, but for those that others of them need: these come after the others."""
    waiting: dict[int, list[Verdict]] = {}
    needing = {step for one in doomed for step in one.generation.manifest.bases}
    ordered = [one for one in doomed if one.generation.step not in needing]
    for one in doomed:
        if one.generation.step in needing:
            waiting.setdefault(one.generation.step, []).append(one)
    # Bases are of earlier steps than what needs them.
    return [*ordered, *(one for step in sorted(waiting, reverse=True) for one in waiting[step])]


def _mortal(one: Generation) -> Generation:
    tags = {tag: reason for tag, reason in one.tags.items() if tag != "permanent"}
    return replace(one, manifest=one.manifest.with_tags(tags))


def _needed(verdict: Verdict, needed: dict[int, int]) -> Verdict:
    step = verdict.generation.step
    if verdict.kept or step not in needed:
        return verdict
    return replace(verdict, kept=True, reason=f"step {needed[step]} needs it as a base")
