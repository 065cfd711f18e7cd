"""One state saved or loaded, without a run around it.

Knows the façade. Knows nothing that it does not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch_ckpt.checkpointer import Checkpointer
from torch_ckpt.config import Config, check_root
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.tiers import Tier
from torch_ckpt.load import Opened, load_fresh, missing_is_damage
from torch_ckpt.reach import Reach
from torch_ckpt.resume import Resumer
from torch_ckpt.sharding.agree import Ranks
from torch_ckpt.storage.store import open_store


def save_generation(
    root: str | os.PathLike[str], state: Any, step: int, **options: Any
) -> Generation:
    """Save one state durably and return its generation.

    Nothing is pruned and no other rank takes part, unless `options`, which are those of
    `Checkpointer`, say so.

    Raises:
        UnsupportedState: something in the state cannot be saved; nothing was written.
        SaveFailed: it did not commit.
    """
    with Checkpointer(root, **{"keep": None, "distributed": False, **options}) as checkpointer:
        folder = checkpointer.save(state, step, block="committed").folder
        return next(one for one in checkpointer.generations() if one.folder == folder)


def load_generation(
    root: str | os.PathLike[str],
    step: int | None = None,
    *,
    folder: str | None = None,
    into: Any = None,
    strict: bool = True,
    allow_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """A saved state: new, on the CPU, or filled into the structure given as `into`.

    Raises:
        GenerationNotFound: there is none; the message says what there is.
        PickleRefused: it holds pickled values and `allow_pickle` is False.
        IntegrityError: stored bytes are not the ones that were written.
        FormatError: a file of it is missing.
    """
    config = Config(
        root=check_root(root), allow_pickle=allow_pickle, storage_options=storage_options or {}
    )
    store = open_store(config.root, config.storage_options)
    reach = Reach([Tier(name="primary", store=store)])
    resumer = Resumer(config, reach, Ranks(False, config.agree_timeout_s))
    chosen = resumer.pick(step, folder)
    if into is None:
        generation = reach.generation(chosen)
        with missing_is_damage(generation.folder):
            opened = Opened(store, generation)
        return load_fresh(opened, rank=0, allow_pickle=allow_pickle)
    resumer.load(chosen, into, strict=strict)
    return into
