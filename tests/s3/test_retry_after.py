"""An archive that asks to be left alone gets no request before, and everything afterwards.

A real trainer, whose archive is a bucket behind a proxy that counts requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.conftest import Start
from tests.s3.archived import Run, ask, end, until
from tests.s3.proxy import Proxy
from tests.s3.rules import retry_after
from tests.s3.servers import Server

SMALL = 2000


@pytest.fixture
def real_run(tmp_path: Path, seaweed_server: Server, prefix: str, start: Start) -> Iterator[Run]:
    with Proxy(seaweed_server.endpoint_url) as proxy:
        yield Run(tmp_path / "root", seaweed_server, proxy, prefix, start)


def test_no_request_comes_in_the_time_that_the_server_asked_for(run: Run) -> None:
    check(run)


@pytest.mark.s3
def test_so_it_is_with_a_real_server(real_run: Run) -> None:
    check(real_run)


def check(run: Run) -> None:
    trainer, _ = run.start(size=SMALL)
    run.proxy.on(retry_after(2), method="PUT", times=2)
    assert ask(trainer, "save", 1)["state"] == "committed"
    assert ask(trainer, "archived", 1)["error"] is None
    log = run.proxy.log()
    refused = [place for place, one in enumerate(log) if one.fault is not None]
    assert len(refused) == 2
    assert refused[1] == refused[0] + 1  # the request, and the one that hears for how long
    assert log[refused[1] + 1].at_s - log[refused[1]].at_s >= 2.0
    said = [line for line in end(trainer) if "left alone for 2 s" in line]
    assert len(said) == 1
    assert run.steps() == [1]
    run.assert_sound()
    assert run.tidy()


def test_a_server_that_asks_for_an_hour_holds_up_neither_training_nor_the_end(run: Run) -> None:
    trainer, _ = run.start(size=SMALL, archive_timeout_s=1.0)
    rule = run.proxy.on(retry_after(7200), times=math.inf)
    assert ask(trainer, "save", 1)["state"] == "committed"
    until(lambda: rule.struck >= 2)
    for step in (2, 3):
        assert ask(trainer, "save", step)["state"] == "committed"
    log = end(trainer)
    assert rule.struck == 2
    assert len([line for line in log if "left alone for 3600 s" in line]) == 1, log
    run.await_writers()
    run.proxy.clear()
    assert run.train(4, size=SMALL)["step"] == 3
    assert run.steps() == [1, 2, 3, 4]
    run.assert_sound()
