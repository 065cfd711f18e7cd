"""What a Lightning checkpoint leaves out, besides the data position and random state.

Logged metrics and the sums behind epoch means, states of torchmetrics, buffers that are not in the
state dict or differ between ranks, gradients that wait for more batches, and what callbacks keep
only in attributes. Values are the live tensors: whoever stores them copies them first.
Knows a trainer's module, callbacks and logger connector. Knows nothing of loops or storage.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import torch
from torch import Tensor

from lightning_ckpt.loops import Loops
from lightning_ckpt.strategy import local_of

logger = logging.getLogger(__name__)

_CALLBACK_FIELDS = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
    "_latest_update_step",
    "_latest_update_epoch",
)
_META_FIELDS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


def unsaved(loops: Loops) -> dict[str, Any]:
    """Everything this module names, of this rank."""
    trainer = loops.trainer
    module = trainer.lightning_module
    return {
        "metrics": _metrics(loops),
        "torchmetrics": _torchmetrics(module),
        "buffers": _buffers(module, every=trainer.world_size > 1),
        "gradients": _gradients(loops),
        "callbacks": _callbacks(trainer),
        "should_stop": bool(trainer.should_stop),
    }


def restore_unsaved(loops: Loops, state: dict[str, Any]) -> None:
    """Put back what `unsaved` returned; names that are gone are left out, with a warning."""
    trainer = loops.trainer
    module, device = trainer.lightning_module, trainer.strategy.root_device
    _restore_torchmetrics(module, state["torchmetrics"], device)
    _restore_metrics(loops, state["metrics"], device)
    _restore_buffers(module, state["buffers"])
    parameters = _parameters(module) if state["gradients"] else {}
    for name, gradient in state["gradients"].items():
        if name in parameters:
            parameter = parameters[name]
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            local_of(parameter.grad).copy_(gradient)
    _restore_callbacks(trainer, state["callbacks"])
    if state["should_stop"] and any(map(_is_out_of_patience, trainer.callbacks)):
        logger.warning("The run that was saved had been stopped early; it stops again")
        trainer.should_stop = True


# ── metrics ───────────────────────────────────────────────────────────────────────────────────


def _metrics(loops: Loops) -> dict[str, Any]:
    connector = loops.connector
    return {
        "callback": _plain(connector._callback_metrics),
        "logged": _plain(connector._logged_metrics),
        "progress_bar": _plain(connector._progress_bar_metrics),
        "current_fx": connector._current_fx,
        "results": [
            entry
            for key, metric in loops.epoch._results.items()
            if (entry := _result(key, metric)) is not None
        ],
    }


def _result(key: str, metric: Any) -> dict[str, Any] | None:
    """One running result of `self.log`; None where a process group is part of it."""
    meta = metric.meta
    if meta.sync.group is not None:
        logger.warning("The running value of %r is not kept: it has a process group", meta.name)
        return None
    return {
        "key": key,
        "meta": {name: getattr(meta, name) for name in _META_FIELDS},
        "reduce": meta.reduce_fx.__name__,
        "sync": {"should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": metric.is_tensor,
        "value": _detached(metric.value) if metric.is_tensor else None,
        "batch_size": _detached(getattr(metric, "cumulated_batch_size", None)),
        "last": _detached(metric._forward_cache),
        "has_reset": metric.has_reset,
        "updates": getattr(metric, "_update_count", 0),
    }


def _restore_metrics(loops: Loops, state: dict[str, Any], device: torch.device) -> None:
    connector, results = loops.connector, loops.epoch._results
    connector._callback_metrics = _moved(state["callback"], device)
    connector._logged_metrics = _moved(state["logged"], device)
    connector._progress_bar_metrics = dict(state["progress_bar"])
    connector._current_fx = state["current_fx"]
    results.clear()
    home = sys.modules[type(results).__module__]  # of the twin that this trainer belongs to
    for entry in state["results"]:
        meta = home._Metadata(reduce_fx=entry["reduce"], **entry["meta"])
        sync = entry["sync"]
        meta.sync = home._Sync(
            _should=sync["should"],
            fn=loops.trainer.strategy.reduce,
            rank_zero_only=sync["rank_zero_only"],
        )
        metric = home._ResultMetric(meta, entry["is_tensor"])
        if entry["is_tensor"]:
            metric.value = entry["value"].clone()
            if entry["batch_size"] is not None:
                metric.cumulated_batch_size = entry["batch_size"].clone()
        else:
            attribute = entry["meta"]["metric_attribute"]
            metric.value = loops.trainer.lightning_module.get_submodule(attribute)
        metric._forward_cache = entry["last"]
        metric.has_reset = entry["has_reset"]
        metric._update_count = entry["updates"]
        results[entry["key"]] = metric.to(device)


def _torchmetrics(module: Any) -> dict[str, Any]:
    return {
        name: {
            "state": {key: _detached(value) for key, value in metric.metric_state.items()},
            "updates": metric._update_count,
            "last": _detached(metric._forward_cache),
        }
        for name, metric in _metric_modules(module).items()
    }


def _restore_torchmetrics(module: Any, state: dict[str, Any], device: torch.device) -> None:
    metrics = _metric_modules(module)
    for name, saved in state.items():
        if name not in metrics:
            logger.warning("The module has no metric %r any more; its state is dropped", name)
            continue
        for key, value in saved["state"].items():
            copied = [item.clone() for item in value] if isinstance(value, list) else value.clone()
            setattr(metrics[name], key, _moved(copied, device))
        metrics[name]._update_count = saved["updates"]
        metrics[name]._forward_cache = _moved(saved["last"], device)
        metrics[name]._computed = None


def _metric_modules(module: Any) -> dict[str, Any]:
    return {
        name: item
        for name, item in module.named_modules()
        if hasattr(item, "metric_state") and hasattr(item, "_update_count")
    }


# ── buffers, gradients, callbacks ─────────────────────────────────────────────────────────────


def _buffers(module: Any, *, every: bool) -> dict[str, Tensor]:
    """The buffers that no state dict has; with `every`, also those that differ between ranks."""
    if every:
        return {name: local_of(buffer) for name, buffer in module.named_buffers()}
    return {
        f"{path}.{name}" if path else name: part._buffers[name]
        for path, part in module.named_modules()
        for name in sorted(part._non_persistent_buffers_set)
        if part._buffers.get(name) is not None
    }


def _restore_buffers(module: Any, state: dict[str, Tensor]) -> None:
    present = dict(module.named_buffers())
    for name, value in state.items():
        buffer = present.get(name)
        if buffer is not None:
            mine = local_of(buffer)
            if mine.shape == value.shape and mine.dtype == value.dtype:
                with torch.no_grad():
                    mine.copy_(value)
                continue
        owner, _, last = name.rpartition(".")
        try:
            buffers = module.get_submodule(owner)._buffers
        except AttributeError:
            logger.warning("The module has no buffer %r any more; it is dropped", name)
            continue
        buffers[last] = value.clone().to(module.device)


def _gradients(loops: Loops) -> dict[str, Tensor]:
    """Gradients that a later step needs: between optimizer steps, or under manual optimization."""
    module = loops.trainer.lightning_module
    if module.automatic_optimization and not loops.accumulating():
        return {}
    return {
        name: local_of(parameter.grad)
        for name, parameter in _parameters(module).items()
        if parameter.grad is not None
    }


def _parameters(module: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that have gradients: after a forward FSDP2 may show gathered ones instead."""
    module.state_dict(keep_vars=True)  # which puts those back that each rank has a part of
    return dict(module.named_parameters())


def _callbacks(trainer: Any) -> dict[str, dict[str, Any]]:
    state = {}
    for callback in trainer.callbacks:
        fields: dict[str, Any] = {
            name: value
            for name in _CALLBACK_FIELDS
            if isinstance(value := vars(callback).get(name), bool | int | str)
        }
        if isinstance(checked := vars(callback).get("_last_time_checked"), float):
            fields["since_checked_s"] = time.monotonic() - checked
        if fields:
            state[callback.state_key] = fields
    return state


def _restore_callbacks(trainer: Any, state: dict[str, dict[str, Any]]) -> None:
    for callback in trainer.callbacks:
        fields = dict(state.get(callback.state_key, {}))
        if (since := fields.pop("since_checked_s", None)) is not None:
            callback._last_time_checked = time.monotonic() - since
        for name, value in fields.items():
            setattr(callback, name, value)


def _is_out_of_patience(callback: Any) -> bool:
    """Whether it is an EarlyStopping that had stopped the run; a Timer may have got more time."""
    waited, patience = getattr(callback, "wait_count", None), getattr(callback, "patience", None)
    return waited is not None and patience is not None and waited >= patience


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _detached(value) for name, value in values.items()}


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, list):
        return [_detached(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else None


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    if isinstance(value, dict):
        return {name: _moved(item, device) for name, item in value.items()}
    return value
