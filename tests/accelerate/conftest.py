"""What tests that make an Accelerator in this process share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.accelerate.job import reset


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No option from outside, and none of Accelerate's own state from another test."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_CKPT", "ACCELERATE_USE_CKPT")):
            monkeypatch.delenv(name)
    reset()
    yield
    reset()
