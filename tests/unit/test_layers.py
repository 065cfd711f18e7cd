"""What a fresh interpreter may import, and that errors reach other processes whole."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import pytest

import torch_ckpt
from torch_ckpt import errors

FRAMEWORKS = ("torch", "lightning", "pytorch_lightning", "accelerate", "transformers")

FACTS: dict[str, dict[str, object]] = {
    "UnsupportedState": {"key": "model.w", "what": "a sparse tensor", "remedy": "densify it"},
    "SaveFailed": {"step": 7, "reason": "the disk is full"},
    "WriterDied": {"step": 7, "reason": "signal 9"},
    "SaveSkipped": {"step": 7, "reason": "both slabs were busy"},
    "ServerBusy": {"refusal": "s3://bucket refuses", "retry_after_s": 30},
    "ArchiveTaken": {"archive": "s3://bucket/run7", "owner": "0f3a", "run": "91bc"},
    "NotArchived": {"step": 7, "reason": "its writer has ended"},
    "SnapshotTorn": {"step": 7, "tensors": ["b", "a"]},
    "IntegrityError": {
        "file": "step-7/rank-00000.x.safetensors",
        "offset": 4096,
        "reason": "sha256 differs",
        "tensors": ["w", "b"],
    },
    "FormatError": {"file": "manifest.json", "reason": "version 9 is unknown"},
    "NothingUsable": {"root": "/runs/7", "reasons": ["step 7: damaged", "step 6: unreadable"]},
    "StateMismatch": {
        "where": "step-7",
        "missing": ["a"],
        "surplus": ["b"],
        "misshaped": ["c"],
    },
    "ClassNotLoaded": {"key": "hparams.kind", "name": "jobs.train:Kind"},
    "PickleRefused": {"where": "step-7", "values": ["hparams.fn: function"]},
}
"""Constructor arguments of every error that takes facts; the others take one message."""


def error_classes() -> list[type[errors.CkptError]]:
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.CkptError)
    ]


def construct(kind: type[errors.CkptError]) -> errors.CkptError:
    facts = FACTS.get(kind.__name__)
    return kind("what, where, and the next move") if facts is None else kind(**facts)


def modules_after(statement: str) -> set[str]:
    """Names of all modules that a fresh interpreter holds after `statement`."""
    program = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "torch_ckpt",
        "torch_ckpt.writer.process",
        "torch_ckpt.generations.catalog",
        "torch_ckpt.generations.retention",
        "torch_ckpt.cli.main",
    ],
)
def test_import_brings_no_torch_and_no_framework(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert not loaded.intersection(FRAMEWORKS)


def test_errors_and_generations_are_reached_without_torch() -> None:
    loaded = modules_after("from torch_ckpt import Generation, KeepLast, SaveFailed, __version__")
    assert not loaded.intersection(FRAMEWORKS)


def test_engine_brings_no_framework() -> None:
    loaded = modules_after(
        "import torch_ckpt\nfor name in torch_ckpt.__all__: getattr(torch_ckpt, name)"
    )
    assert "torch" in loaded
    assert not loaded.intersection(set(FRAMEWORKS) - {"torch"})


@pytest.mark.parametrize("name", torch_ckpt.__all__)
def test_public_name_resolves_and_says_what_it_is(name: str) -> None:
    assert getattr(torch_ckpt, name).__doc__
    assert name in dir(torch_ckpt)


def test_every_error_is_public() -> None:
    assert {kind.__name__ for kind in error_classes()} <= set(torch_ckpt.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Chekpointer'"):
        _ = torch_ckpt.Chekpointer  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_error_survives_pickling_with_its_facts(
    kind: type[errors.CkptError], protocol: int
) -> None:
    error = construct(kind)
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert copy.args == error.args
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_error_message_holds_its_facts(kind: type[errors.CkptError]) -> None:
    message = str(construct(kind))
    facts = FACTS.get(kind.__name__, {})
    for fact in facts.values():
        for word in fact if isinstance(fact, list) else [fact]:
            assert str(word) in message


def test_error_with_an_errno_keeps_it() -> None:
    error = errors.StorageError(28, "No space left on device", "/runs/7/manifest.json")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.errno, copy.filename, str(copy)) == (28, "/runs/7/manifest.json", str(error))
