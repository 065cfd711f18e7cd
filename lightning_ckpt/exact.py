"""Exact resume of a Lightning run: random state, place in the data, and the rest of the iteration.

    exact = ExactResume()
    exact.setup(trainer)                  # in Callback.setup, for the stage "fit"
    exact.on_train_batch_start(trainer)   # and the other on_* methods, in the hooks of their names
    state = exact.state_dict(trainer)     # on every rank, when a checkpoint is made
    exact.load_state_dict(state)          # this rank's, when a checkpoint is loaded
    exact.restore(trainer)                # in on_train_start, after everything else
    exact.teardown(trainer)

How it works. Three random states are kept: before the loaders were made, before the epoch's
iterator was made, and before the epoch's first batch; with several loaders that cycle, also the
last one before each began anew. To resume, loaders and iterator are made again under those states,
the batches already seen are read again and dropped (so workers end in the very random state they
had), the random state of the save is put back, and whatever the interrupted iteration still had to
do (validation, schedulers, epoch-end logs) is done by Lightning's own code. Batches stay unread
after the last one of an epoch, where that is provably the same (torch's own tensor datasets with
the default collation), and, with `skip="fast"`, in every map-style loader without persistent
workers: exact too if reading a sample draws no random numbers in workers and changes nothing. A
StatefulDataLoader is treated as the plain loader it also is. Its own state, which Lightning would
load, is not used: with it epochs are lost, and worker randomness is.

Where a save may happen. In on_train_batch_end, on_validation_end, on_train_epoch_end, on_exception
and between them. Gradients that wait for later batches are part of the state; `at_optimizer_step`
says whether there are any. In the middle of a step (an exception) the random state is that before
the batch, which is repeated: exact if the step had changed nothing yet, and said in the log.

Not exact: what hooks after the save's own hook change (the module's own `on_train_batch_end` comes
after the callbacks'); random numbers drawn in persistent workers after the first epoch (the order
of samples is exact); datasets and samplers that keep random state of their own over epochs, and
samplers that draw from the global generators for each sample; batches that a `dataloader_iter` step
fetched and kept; streams read in the main process whose order draws from torch's global generator;
a `train_dataloader()` that depends on the epoch; the positions of loggers; what follows a save at
the end of the last epoch (Lightning starts no loop in which it could be done).

On another number of ranks the run goes on with what is left of the epoch: see `elsewhere`.

Knows the order of things. Knows nothing of storage, and Lightning's inside only through `Loops`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from lightning_ckpt import elsewhere
from lightning_ckpt.dealing import Dealt, Rest, give_seeds, place, seeds_of
from lightning_ckpt.loops import Loops, Phase, rewound
from lightning_ckpt.moment import Moment, derived, go_back, has_running_workers, length, moment
from lightning_ckpt.passing import (
    Fastforward,
    fastforward,
    latest,
    read_past,
    start_validation_workers,
)
from lightning_ckpt.strategy import data_parallel
from lightning_ckpt.unsaved import restore_unsaved, unsaved
from torch_ckpt import CkptError, ConfigError

logger = logging.getLogger(__name__)

_VERSION = 1


class NotExact(CkptError, RuntimeError):
    """A saved run cannot be continued exactly in this trainer."""


class ExactResume:
    """Continues a Lightning run, bit for bit, where its checkpoint left it."""

    def __init__(self, *, skip: Literal["exact", "fast"] = "exact", strict: bool = True) -> None:
        """Args:
        skip: whether batches already seen are read again, or map-style loaders go past them.
        strict: whether other data is an error; otherwise it is a warning, and the epoch's data
            begins anew.
        """
        if skip not in ("exact", "fast"):
            raise ConfigError(f'skip must be "exact" or "fast", got {skip!r}')
        self.skip: Literal["exact", "fast"] = skip
        self.strict = strict
        self._loops: Loops | None = None
        self._pending: dict[str, Any] | None = None  # loaded, and not yet continued from
        self._forwards: Sequence[Fastforward | Rest] = ()
        self._entering = False  # restored, and the interrupted epoch is about to be entered again
        self._ran = False  # since `setup`
        self._replayed = False  # the loaders were made under the saved run's random state
        self._due: Moment | None = None  # put back once the on_train_start hooks are over
        self._validated = False
        self._dealt: Dealt | None = None  # the epoch began on another number of ranks
        self._seeds: list[int] = []  # of distributed samplers, when the run began
        self._loaded: Moment | None = None  # before the loaders were made
        self._made: Moment | None = None  # after that
        self._iterated: Moment | None = None  # before the epoch's iterator was; None: as _made
        self._first: Moment | None = None  # before the epoch's first batch
        self._again: list[dict[str, Any]] = []  # before the batches at which a loader began anew
        self._settled: Moment | None = None  # after the last complete iteration
        self._under: deque[Moment | None] = deque(maxlen=2)  # before the last fetches
        self._iterators: list[Callable[[], Any]] = []

    # ── hooks ─────────────────────────────────────────────────────────────────────────────────

    def setup(self, trainer: Any) -> None:
        """Begin to watch this trainer's loops; again after anything else, a tuner, has run them.

        Loaders that were made unwatched are made once more, so call it first in Callback.setup.
        """
        self._loops = Loops(trainer)
        if self._loops.combined is not None and (self._ran or self._loaded is None):
            self._loops.drop_train_loaders()
        self._ran = False
        self._loops.intercept(
            setup_data=self._setup_data,
            before_first_iteration=self._before_first_iteration,
            on_run_start=self._on_run_start,
        )

    def teardown(self, trainer: Any) -> None:
        """Give the loops their own methods back."""
        if self._loops is not None and self._loops.trainer is trainer:
            self._loops.release()
            self._loops, self._iterators = None, []

    def on_train_batch_start(self, trainer: Any) -> None:
        """Notice that a loader among several was exhausted and began anew."""
        self._validated = False
        loops = self._watched(trainer)
        self._under.append(self._settled)
        if len(loops.train_loaders) < 2:
            return
        iterators = loops.iterators
        anew = [
            index
            for index, (new, old) in enumerate(zip(iterators, self._iterators, strict=False))
            if new() is not old()
        ]
        if anew and self._settled is not None:
            entry = {"call": loops.batches - 1, "loaders": anew, "moment": self._settled}
            self._again = latest([*self._again, entry])
        self._iterators = iterators

    def on_train_batch_end(self, trainer: Any) -> None:
        """Note the random state that the next batch will be fetched under."""
        self._settled = moment(self._loaders(trainer))

    def on_validation_start(self, trainer: Any) -> None:
        """Note that a validation runs."""
        self._validated = False

    def on_validation_end(self, trainer: Any) -> None:
        """Note the random state after a validation."""
        if not trainer.sanity_checking:
            self._validated = True
            self._settled = moment(self._loaders(trainer))

    # ── saving ────────────────────────────────────────────────────────────────────────────────

    def at_optimizer_step(self, trainer: Any) -> bool:
        """Whether, in on_train_batch_end, no gradients wait for later batches."""
        return not self._watched(trainer).accumulating()

    def state_dict(self, trainer: Any) -> dict[str, Any]:
        """This rank's state, in plain containers, numbers, tensors and arrays."""
        loops = self._watched(trainer)
        phase = loops.phase(validated=self._validated)
        loaders = loops.train_loaders
        counters, now = loops.counters(), moment(self._loaders(trainer))
        if phase == "in_step":
            logger.warning(
                "Saved in the middle of a step, which will be repeated; the resumed run is the "
                "same only if that step had changed nothing yet"
            )
            counters = rewound(counters, epoch=False)
        elif phase == "boundary":
            counters = rewound(counters, epoch=True)
        if phase in ("in_step", "in_validation") and self._settled is not None:
            now = self._settled
        batch = counters["progress"]["batch"]
        return {
            "version": _VERSION,
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "step": int(trainer.global_step),
            "phase": phase,
            "counters": counters,
            "batches": batch["current"]["ready"],
            "waiting": loops.waiting(batch),
            "checked_every": trainer.val_check_batch,
            "place": place(
                loaders,
                trainer.world_size,
                batches=batch["current"]["ready"],
                under=(self._iterated or self._made, self._first),
                dealt=self._dealt,
            ),
            "seeds": seeds_of(loaders, self._seeds),
            "fetched": loops.fetched(phase),
            "lengths": [length(loader) for loader in loaders],
            "now": now,
            "loaded": self._loaded,
            "iterated": self._iterated,
            "first": self._first,
            "again": list(self._again),
            "ahead": self._ahead(loops, phase),
            "validation_workers": [has_running_workers(dl) for dl in loops.validation_loaders],
            "unsaved": unsaved(loops),
        }

    def _ahead(self, loops: Loops, phase: Phase) -> Moment | None:
        """Before the last fetch, if that read ahead."""
        under = list(self._under)[: -1 if phase == "in_step" else None]
        return under[-1] if under and loops.fetcher is not None and loops.reads_ahead else None

    # ── resuming ──────────────────────────────────────────────────────────────────────────────

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what `state_dict` returned for this rank, until `restore`."""
        if state.get("version") != _VERSION:
            raise NotExact(
                f"the saved data position has version {state.get('version')!r}, this release reads "
                f"version {_VERSION}; resume with the release that saved it"
            )
        self._pending, self._replayed = state, False

    def restore(self, trainer: Any) -> None:
        """Continue from the loaded state; does nothing in a run that starts afresh."""
        state = self._pending
        if state is None:
            return
        loops = self._watched(trainer)
        if not self._replayed:  # the state came after the loaders were made
            loops.drop_train_loaders()
            self._setup_data()
        if dealing := elsewhere.needs_dealing(state, trainer.world_size):
            other = elsewhere.other_data(state, loops)
            self._refuse_if_strict(other)
            state = self._pending = elsewhere.adapted(state, loops, anew=other)
        elif (reason := elsewhere.difference(state, loops)) is not None:
            self._begin_anew(trainer, state, reason)
            return
        loops.set_counters(state["counters"])
        restore_unsaved(loops, state["unsaved"])
        start_validation_workers(loops, state["validation_workers"])
        self._loaded, self._iterated = state["loaded"], state["iterated"]
        self._first, self._again = state["first"], list(state["again"])
        go_back(state["now"], self._loaders(trainer))
        if state["phase"] in ("boundary", "epoch_end"):
            loops.forget_restart()
            loops.finish(state["phase"])
            self._pending, self._due = None, moment(self._loaders(trainer))
        else:
            loops.enter_epoch_again()
            self._entering = True  # _on_run_start does the rest
        how = "Resume" if dealing else "Exact resume"
        logger.info("%s at step %s, %s", how, trainer.global_step, elsewhere.described(state))

    def _begin_anew(self, trainer: Any, state: dict[str, Any], reason: str) -> None:
        self._refuse_if_strict(reason)
        logger.warning("Not an exact resume: %s; the epoch's data begins anew", reason)
        rank, now = trainer.global_rank, state["now"]
        here = data_parallel(trainer.strategy)
        go_back(now if state["rank"] == rank else derived(now, *here), [])
        self._pending = None

    def _refuse_if_strict(self, reason: str | None) -> None:
        if reason is not None and self.strict:
            raise NotExact(
                f"cannot resume the data position exactly: {reason}; start with what it was saved "
                "with, or pass strict=False to begin the interrupted epoch's data anew"
            )

    # ── in place of the loops' own methods ────────────────────────────────────────────────────

    def _setup_data(self) -> None:
        """`fit_loop.setup_data`: makes the loaders, if it is time, and their first iterator."""
        loops = self._watched(None)
        if self._due is not None:
            go_back(self._due, self._loaders(loops.trainer))
            self._due = None
        saved = self._pending["loaded"] if self._pending is not None else None
        present = moment(loops.train_loaders)
        before = loops.combined, loops.iteration
        if saved is not None:
            go_back(saved, loops.train_loaders)
        try:
            loops.own("setup_data")()
        finally:
            for forward in self._forwards:
                forward.remove()
        if (loops.combined, loops.iteration) == before:
            if saved is not None:
                go_back(present, loops.train_loaders)
            return
        self._replayed = saved is not None
        self._loaded, self._iterated = saved or present, None
        self._again = []

    def _before_first_iteration(self) -> None:
        """`fit_loop._load_combined_loader_states`: between making the loaders and iterating."""
        state, loops = self._pending, self._watched(None)
        self._seeds = self._seeds if state is None else list(state.get("seeds", []))
        give_seeds(loops.train_loaders, self._seeds)
        self._made = moment(loops.train_loaders)
        if state is None:
            loops.own("load_states")()
        elif state["iterated"] is None:
            self._leave_unread(state)

    def _on_run_start(self, fetcher: Any) -> None:
        """`epoch_loop.on_run_start`: the last thing before an epoch's batches."""
        loops = self._watched(None)
        if self._pending is not None and self._entering:
            self._go_to_batch(loops, self._pending)
            return
        self._ran, self._replayed = True, False
        before, present = loops.iteration, moment(self._loaders(loops.trainer))
        loops.own("on_run_start")(fetcher)
        if loops.iteration is not before:
            self._iterated, self._again = present, []
        self._dealt = None
        self._begin_epoch(loops)
        self._first = self._settled

    def _begin_epoch(self, loops: Loops) -> None:
        self._under.clear()
        self._iterators = loops.iterators
        self._settled = moment(self._loaders(loops.trainer))

    # ── getting back to a batch ───────────────────────────────────────────────────────────────

    def _leave_unread(self, state: dict[str, Any]) -> None:
        """Have the next iterator begin after the batches already seen, where that is allowed."""
        loops = self._watched(None)
        loaders, self._forwards = loops.train_loaders, []
        if "renumbered" in state or elsewhere.needs_dealing(state, loops.trainer.world_size):
            if state.get("rest") is not None:
                self._forwards = [Rest(loaders[0], state["rest"])]
        else:
            self._forwards = fastforward(loaders, state, self.skip)

    def _go_to_batch(self, loops: Loops, state: dict[str, Any]) -> None:
        """Put the iterator where it was, then everything else, and end the iteration."""
        fetcher, loaders = loops.fetcher, self._loaders(loops.trainer)
        if renumbered := "renumbered" in state:
            loops.combined.reset()  # running workers have been sent other samples already
        if state["iterated"] is not None:
            go_back(state["iterated"], loaders)
            self._leave_unread(state)
            try:
                iter(fetcher)
            finally:
                for forward in self._forwards:
                    forward.remove()
        if state["first"] is not None:
            go_back(state["first"], loaders)
        self._pass_over(loops, state)
        loops.fetcher.fetched -= loops.batches  # Lightning's own on_run_start adds them
        loops.own("on_run_start")(fetcher)
        loops.forget_restart()
        loops.set_counters(state["counters"])
        loops.connector._first_loop_iter = {0: None, 1: True}.get(state["batches"], False)
        go_back(state["now"], loaders)
        self._pending, self._forwards, self._entering = None, [], False
        self._begin_epoch(loops)
        self._under.append(state["ahead"])
        self._dealt = elsewhere.dealt_in(state, batches=loops.batches)
        loops.finish(state["phase"], checked_every=state["checked_every"] if renumbered else None)
        if renumbered:
            loops.renumber(state["batches"])
            self._dealt = elsewhere.dealt_in(state, batches=loops.batches)
        self._settled = moment(loaders)

    def _pass_over(self, loops: Loops, state: dict[str, Any]) -> None:
        """Read and drop the batches already seen, or draw their indices only."""
        for forward in self._forwards:
            forward.advance()
        last = state["counters"]["progress"]["batch"]["is_last_batch"]
        if self._forwards or last:
            seen = state["batches"] if state["fetched"] is None else state["fetched"]
            loops.pass_unread(seen, last=last)
            return
        try:
            read_past(loops, state, self._loaders(None))
        except StopIteration:
            raise NotExact(
                f"the data ended before batch {state['batches']} of the epoch, where the run was "
                "saved; resume with the data it was saved with"
            ) from None

    def _watched(self, trainer: Any) -> Loops:
        if self._loops is None or trainer not in (None, self._loops.trainer):
            raise NotExact("ExactResume.setup(trainer) must come first, when the stage is fit")
        return self._loops

    def _loaders(self, trainer: Any) -> list[Any]:
        loops = self._watched(trainer)
        return [*loops.train_loaders, *loops.validation_loaders]
