"""What ranks must have in common to save together, and in words where they do not.

Knows flat states. Knows nothing of groups or plans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from torch_ckpt.manifest.digest import canonical_json
from torch_ckpt.staging.regions import dtype_name
from torch_ckpt.staging.sharded import described
from torch_ckpt.staging.tree import Flat

Fact = tuple[str, str]
"""A name, and what is under it."""

_NAMED = 3


def facts_of(flat: Flat) -> list[Fact]:
    """What has to be the same on all ranks, in the order of the state; plain texts."""
    facts = []
    for name, tensor in flat.tensors.items():
        if name in flat.sharded:
            shape, placements, mesh = described(flat.sharded[name])
            how = f" as {', '.join(map(str, placements))} of a mesh {mesh}"  # type: ignore[arg-type]
        elif name in flat.own:
            continue
        else:
            shape, how = list(tensor.shape), ""
        facts.append((name, f"{dtype_name(tensor.dtype)}{shape}{how}"))
    # The tree that is stored is rank 0's: what only others have under a name would be lost.
    return facts + [(path, "a PerRank") for path in flat.per_rank]


def fingerprint_of(flat: Flat) -> str:
    """Equal on two ranks if and only if the facts are."""
    return hashlib.sha256(canonical_json([list(fact) for fact in facts_of(flat)])).hexdigest()


def difference(one: int, ones: Sequence[Fact], other: int, others: Sequence[Fact]) -> str:
    """How the facts of two ranks differ, naming keys."""
    left, right = dict(ones), dict(others)
    found = [
        *_only(one, [name for name in left if name not in right]),
        *_only(other, [name for name in right if name not in left]),
    ]
    unlike = [name for name in left if name in right and left[name] != right[name]]
    found += [
        f"{name!r} is {left[name]} on rank {one} and {right[name]} on rank {other}"
        for name in unlike[:_NAMED]
    ]
    if len(unlike) > _NAMED:
        found.append(f"so do {len(unlike) - _NAMED} more differ")
    if not found:
        moved = next((a for a, b in zip(left, right, strict=True) if a != b), "")
        found.append(f"they come in another order, from {moved!r} on")
    return "; ".join(found)


def _only(rank: int, names: Iterable[str]) -> list[str]:
    listed = list(names)
    if not listed:
        return []
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return [f"only rank {rank} has {', '.join(map(repr, listed[:_NAMED]))}{more}"]
