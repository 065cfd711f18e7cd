"""One server of each kind for the tests of a session that ask for it, and a fresh place in it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.conftest import Start, start
from tests.s3.archived import Run
from tests.s3.proxy import Proxy
from tests.s3.servers import Server, moto, seaweed, weed_program

__all__ = ["start"]


@pytest.fixture(scope="session")
def moto_server() -> Iterator[Server]:
    """An imitation of S3: for the default suite."""
    with moto() as server:
        yield server


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[Server]:
    """A real object store: for tests marked `s3`."""
    if weed_program() is None:
        pytest.skip("no SeaweedFS for this platform")
    with seaweed() as server:
        yield server


@pytest.fixture
def prefix() -> str:
    """A part of a bucket that no other test uses."""
    return f"runs/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(moto_server: Server) -> Iterator[Proxy]:
    """In front of the imitation: it counts requests, and breaks those that it is told to."""
    with Proxy(moto_server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def run(tmp_path: Path, moto_server: Server, proxy: Proxy, prefix: str, start: Start) -> Run:
    """A run with an archive behind the proxy, which has not begun."""
    return Run(tmp_path / "root", moto_server, proxy, prefix, start)
