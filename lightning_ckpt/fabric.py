"""Checkpoints for a Fabric loop: one object that saves and resumes, whatever the strategy.

Fabric's sharded strategies take no `CheckpointIO`, and its `save` knows neither steps nor what may
be copied behind training. So this stands beside Fabric: it takes the wrappers off modules and
optimizers and hands the live state to the engine. Knows Fabric's wrappers and the engine. Knows
nothing of how a save is done or which generation is good.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from typing_extensions import Self, override

from lightning_ckpt.paths import as_url
from lightning_ckpt.reading import KEY
from lightning_ckpt.strategy import data_parallel, refuse_strategy
from torch_ckpt import Checkpointer, ConfigError, Generation, PendingSave, PerRank, RngState

State = dict[str, Any]
"""What `fabric.save` takes: modules, optimizers, loaders, plain values, anything with a
`state_dict`, nested in dicts and lists."""


def attach(
    fabric: Any, root: str | os.PathLike[str], *, rng: bool = True, **options: Any
) -> FabricCheckpointer:
    """Checkpoints of a Fabric loop under `root`; all ranks call it, after `fabric.launch()`.

    Args:
        rng: whether the random state of every rank is saved and restored too.
        options: those of `torch_ckpt.Checkpointer`, such as `keep`, `mode` and `on_error`.

    Raises:
        ConfigError: the strategy cannot be served, or its ranks do not run yet.
    """
    strategy = fabric.strategy
    refuse_strategy(strategy, who="lightning_ckpt.attach")
    several = getattr(strategy, "cluster_environment", None) is not None
    if several and not dist.is_initialized():
        raise ConfigError(
            f"the ranks of Fabric's {type(strategy).__name__} do not run yet; call fabric.launch() "
            "before lightning_ckpt.attach(fabric, ...)"
        )
    return FabricCheckpointer(strategy, as_url(root), rng=rng, options=options)


class FabricCheckpointer:
    """Saves behind training, and brings a Fabric loop back. Made by `attach`.

    Every rank calls every method, at the same steps.
    """

    def __init__(self, strategy: Any, root: str, *, rng: bool, options: Mapping[str, Any]) -> None:
        self._rng = _Random(*data_parallel(strategy)) if rng else None
        self._engine = Checkpointer(root, **options)

    def save(
        self,
        step: int,
        state: State,
        *,
        block: Literal["copied", "staged", "committed"] | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: Iterable[str] = (),
    ) -> PendingSave:
        """Save a state as the generation of a step, in the background.

        What optimizers own is copied while training goes on, until the next optimizer step.

        Args:
            block: when to return, as in `torch_ckpt.Checkpointer.save`.
            metrics: numbers to record; `KeepBest` ranks by them.
            tags: "permanent" exempts the generation from retention.

        Raises:
            UnsupportedState: something in the state cannot be saved; nothing was written.
            DisagreementError: the ranks do not save the same thing.
        """
        return self._engine.save(self._whole(state), step, block=block, metrics=metrics, tags=tags)

    def resume(
        self, state: State, *, step: int | None = None, strict: bool = True
    ) -> Generation | None:
        """Fill a state from the newest usable generation; None if there is none yet.

        Modules and optimizers are filled in place, also if another number of ranks saved them;
        plain values are replaced in `state`.

        Raises:
            NothingUsable: there are generations, and none can be used.
            StateMismatch: keys or shapes do not fit, and `strict` is True.
        """
        whole = self._whole(state)
        generation = self._engine.resume(whole, step=step, strict=strict)
        if generation is not None:
            _put_back(state, whole)
        return generation

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every save is committed or failed.

        Raises:
            SaveFailed: one failed and no earlier call has raised it.
        """
        self._engine.wait(timeout_s)

    def close(self) -> None:
        """Finish every save, end the writer, free the buffers.

        Raises:
            SaveFailed: a save failed and no earlier call has raised it.
        """
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._engine.__exit__(*error)

    def _whole(self, state: State) -> State:
        if not isinstance(state, dict):
            raise ConfigError(
                "the state must be a dict, such as {'model': model, 'optimizer': optimizer}, got "
                f"{type(state).__name__}"
            )
        if KEY in state:
            raise ConfigError(f"the key {KEY!r} of a state is taken; rename it")
        whole = {key: _unwrapped(value) for key, value in state.items()}
        if self._rng is not None:
            whole[KEY] = {"rng": PerRank(self._rng)}
        return whole


class _Random(RngState):
    """The random state of a rank; ranks that see the same data get the same one."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    @override
    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], rank: int, world_size: int
    ) -> dict[str, Any]:
        return super().reshard_state_dict(states, self._rank, self._ranks)


# ── Fabric's wrappers ─────────────────────────────────────────────────────────────────────────


def _unwrapped(value: Any) -> Any:
    """A value without wrappers; a container of which nothing is wrapped is itself."""
    if isinstance(value, (dict, list)):
        inner = _inner(value)
        found = {key: _unwrapped(item) for key, item in inner.items()}
        if all(found[key] is item for key, item in inner.items()):
            return value
        return found if isinstance(value, dict) else list(found.values())
    kinds = {kind.__name__ for kind in type(value).__mro__}
    if "OptimizedModule" in kinds:
        return _unwrapped(value._orig_mod)
    if "_FabricModule" in kinds:
        return _unwrapped(value._forward_module)
    if "DistributedDataParallel" in kinds:
        return value.module
    if "_FabricOptimizer" in kinds:
        return value.optimizer
    if "_FabricDataLoader" in kinds:
        return PerRank(value._dataloader)  # its place in the data is this rank's alone
    return value


def _put_back(state: Any, filled: Any) -> None:
    """Replace plain values in the user's containers by those that were loaded."""
    inner = _inner(state)
    for key, new in _inner(filled).items():
        old = inner.get(key)
        if isinstance(old, (dict, list)) and type(old) is type(new):
            if old is not new:
                _put_back(old, new)
        elif key in inner and new is not old and _unwrapped(old) is old:
            state[key] = new


def _inner(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else dict(enumerate(value))
