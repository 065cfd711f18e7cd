"""A saved position as another number of ranks continues from it.

Counters of an epoch are those that this number of ranks would have; random state is derived from
the saved one, differently for each rank and always in the same way; gradients that waited for
later batches are dropped, and those batches are read again.
Knows saved positions and dealing. Knows nothing of how loops are entered.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning_ckpt.dealing import Dealt, batches_of, rest_of, share_of
from lightning_ckpt.loops import Loops
from lightning_ckpt.moment import derived, length
from lightning_ckpt.strategy import data_parallel

logger = logging.getLogger(__name__)

_STEPPED = ("batch_end", "in_validation", "validated")  # and did not count the step yet


def needs_dealing(state: dict[str, Any], world_size: int) -> bool:
    """Whether the data of the interrupted epoch is not simply that of one loader's epoch."""
    found = state.get("place")
    return state["world_size"] != world_size or (
        found is not None and found["dealt"] and not _between_epochs(state)
    )


def difference(state: dict[str, Any], loops: Loops) -> str | None:
    """Why a position saved by as many ranks cannot be continued exactly; None if it can."""
    if state["rank"] != (rank := loops.trainer.global_rank):
        return f"it is the state of rank {state['rank']}, this is rank {rank}"
    lengths = [length(loader) for loader in loops.train_loaders]
    if state["lengths"] != lengths:
        return f"loaders had {state['lengths']} batches, now they have {lengths}"
    return None


def described(state: dict[str, Any]) -> str:
    """Where a position is, for the log."""
    if _between_epochs(state):
        return "between epochs"
    return f"after batch {state['batches']} of the epoch"


def other_data(state: dict[str, Any], loops: Loops) -> str | None:
    """Why the samples are not the ones the position was saved in; None if they may be."""
    found, loaders = state.get("place"), loops.train_loaders
    if found is None or share_of(loaders, loops.trainer.world_size) is None:
        return None
    size = len(loaders[0].dataset)
    return None if size == found["size"] else f"it had {found['size']} samples, now it has {size}"


def adapted(state: dict[str, Any], loops: Loops, *, anew: str | None) -> dict[str, Any]:
    """The state as if it had been saved here; `anew` is why the epoch's data must begin anew."""
    rank, world_size = loops.trainer.global_rank, loops.trainer.world_size
    moved = state["world_size"] != world_size
    here = {**state, "rank": rank, "world_size": world_size}
    if moved:
        here["now"] = derived(state["now"], *data_parallel(loops.trainer.strategy))
    if _between_epochs(state):
        _tell(loops, state, "the next epoch is dealt among the ranks")
        return here
    here.update(iterated=here["now"], first=here["now"], again=[], ahead=None, fetched=None)
    waiting, found = state.get("waiting", 0) if moved else 0, state.get("place")
    if waiting:  # half of a step cannot be averaged over other ranks: it is done again
        here.update(phase="between", unsaved={**state["unsaved"], "gradients": {}})
    if waiting and found is not None:
        here["place"] = {**found, "seen": found["seen"] - waiting * found["batch"]}
    here["rest"], ready, last = _left(here, loops, state, anew)
    counters = {**state["counters"], "progress": {**state["counters"]["progress"]}}
    counters["progress"]["batch"] = {**counters["progress"]["batch"], "is_last_batch": last}
    if here["rest"] is None and not last:
        # What was still to be done comes again when the epoch gets there again.
        counters["batches_that_stepped"] += here["phase"] in _STEPPED
        here["phase"] = "between"
    return {**here, "batches": ready, "counters": counters, "renumbered": True}


def _left(
    here: dict[str, Any], loops: Loops, saved: dict[str, Any], anew: str | None
) -> tuple[list[list[int]] | None, int, bool]:
    """This rank's batches that are left of the epoch, how many went before, and whether none is.

    The batches are None where the loader gives what is left: the whole epoch, or nothing.
    """
    found, loaders, limit = here.get("place"), loops.train_loaders, loops.fit.max_batches
    if saved["counters"]["progress"]["batch"]["is_last_batch"]:
        _tell(loops, saved, "the epoch's data had all been seen")
        return None, here["batches"] if math.isinf(limit) else int(limit), True
    share = share_of(loaders, loops.trainer.world_size)
    if found is None or share is None or anew is not None:
        why = anew or "it has no order that all ranks share"
        _tell(loops, saved, f"the epoch's data begins anew, for {why}", anew=True)
        return None, 0, False
    batches = batches_of(rest_of(found, share), loaders[0])
    left = max(0, found["size"] - found["seen"])
    _tell(loops, saved, f"the {left} samples left of the epoch are dealt among the ranks")
    ready = len(loaders[0]) - len(batches)
    return batches, int(min(ready, limit)), ready >= limit


def dealt_in(state: dict[str, Any], *, batches: int) -> Dealt | None:
    """What is to be remembered of an epoch whose rest was dealt; `batches` as the loops count."""
    found = state.get("place")
    if found is None or state.get("rest") is None:
        return None
    return Dealt(found["order"], found["seen"], batches)


def _between_epochs(state: dict[str, Any]) -> bool:
    return state["phase"] in ("boundary", "epoch_end")


def _tell(loops: Loops, state: dict[str, Any], data: str, *, anew: bool = False) -> None:
    trainer = loops.trainer
    if not trainer.is_global_zero:
        return
    if state["world_size"] != trainer.world_size:
        logger.warning(
            "Saved with world size %d, resumed with %d: %s; the random state of each rank is "
            "derived from that of rank 0",
            state["world_size"],
            trainer.world_size,
            data,
        )
    else:
        logger.log(
            logging.WARNING if anew else logging.INFO,
            "Resumed in an epoch that another number of ranks began: %s",
            data,
        )
