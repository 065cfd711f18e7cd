"""Generations of every released format and codec load for ever, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import chains
from tests.format.make import ROOTS, digests
from torch_ckpt import load_generation
from torch_ckpt.codecs.names import NAMES
from torch_ckpt.manifest.schema import ENCODED_FORMAT, FORMAT

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ROOTS)
def test_a_golden_root_loads_and_verifies(name: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(HERE / name, tmp_path / name))  # which nothing writes to
    expected = json.loads((root / "expected.json").read_text())
    found = {str(step): digests(load_generation(root, step)) for step in chains.by_step(root)}
    assert found == expected
    chains.assert_sound(root)


def test_the_golden_roots_hold_every_format_and_codec() -> None:
    formats, codecs = set(), set()
    for name in ROOTS:
        for one in chains.by_step(HERE / name).values():
            codecs |= chains.codecs(HERE / name, one)
            for stored in one.manifest.parts:
                part = json.loads((HERE / name / one.folder / stored.name).read_text())
                formats.add(part["format"])
    assert formats == {FORMAT, ENCODED_FORMAT}
    assert codecs == {"raw", *NAMES}
