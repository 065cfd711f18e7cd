"""The options: from arguments, from the environment, and refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from accelerate import Accelerator

from accelerate_ckpt import CheckpointPlugin, attach
from torch_ckpt import ConfigError, KeepLast

pytestmark = pytest.mark.usefixtures("fresh")


def test_the_plugin_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ROOT": "runs/7",
        "EVERY": "500",
        "KEEP": "last=2",
        "RESUME": "never",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_CKPT_{name}", value)
    plugin = CheckpointPlugin(every=7)
    assert (plugin.root, plugin.every, plugin.resume) == ("runs/7", 7, "never")
    assert plugin.keep == KeepLast(2)
    assert CheckpointPlugin.from_environment() is None
    monkeypatch.setenv("ACCELERATE_USE_CKPT", "true")
    assert CheckpointPlugin.from_environment() == CheckpointPlugin()
    monkeypatch.setenv("ACCELERATE_CKPT_EVERY", "often")
    with pytest.raises(ConfigError, match="ACCELERATE_CKPT_EVERY='often'"):
        CheckpointPlugin()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"resume": "maybe"}, "resume must be 'auto' or 'never'"),
        ({"every": -1}, "every must be a whole number"),
        ({"keep": "some"}, "not a retention rule"),
        ({"storage_options": 3}, "storage_options must map"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CheckpointPlugin(**options)


def test_without_a_place_to_save_the_options_are_named() -> None:
    with pytest.raises(ConfigError, match="ACCELERATE_CKPT_ROOT"):
        attach(Accelerator(cpu=True))
