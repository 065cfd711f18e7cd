"""A server that imitates S3, for the stores that talk to one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3.servers import Server, moto
from tests.unit.storage.environment import set_environment


@pytest.fixture(scope="session")
def _moto() -> Iterator[Server]:
    with moto() as server:
        yield server


@pytest.fixture
def server(_moto: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, also where the environment of this test says that S3 is."""
    set_environment(monkeypatch, _moto)
    return _moto
