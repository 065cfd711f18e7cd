"""A server that asks to be left alone: what its header means, and who obeys it."""

from __future__ import annotations

import itertools
import math
import random
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from obstore.exceptions import GenericError

from tests.s3.proxy import Proxy
from tests.s3.rules import SLOW_DOWN, Answer, Request, Reset, Rule, retry_after
from tests.s3.servers import Server, options_for
from tests.suites.store_suite import StoreSuite, source
from torch_ckpt.errors import ServerBusy, StorageError
from torch_ckpt.storage.clients import translate
from torch_ckpt.storage.outgoing import PART_BYTES
from torch_ckpt.storage.remote import open_fsspec
from torch_ckpt.storage.requests import Requests
from torch_ckpt.storage.retry_after import LONGEST_S, pause_asked
from torch_ckpt.storage.store import Store, open_store

SIZE = 2 * PART_BYTES + 77
DATA = random.Random(3).randbytes(SIZE)
NOON, LATER = "Mon, 30 Nov 2026 12:00:00 GMT", "Mon, 30 Nov 2026 12:01:30 GMT"


class TestUnhurriedStore(StoreSuite):
    atomic = False  # the imitation lets two win once in a while
    reads = 32

    @pytest.fixture
    def store(self, server: Server) -> Store:
        url = f"s3://{server.bucket}/run-{uuid.uuid4().hex}"
        return open_store(url, server.storage_options, unhurried=True)


@pytest.mark.parametrize(
    ("header", "sent", "seconds"),
    [
        ("120", None, 120.0),
        (" 1.5 ", None, 1.5),
        ("7200", None, LONGEST_S),
        (LATER, NOON, 90.0),
        (LATER, "Mon, 30 Nov 2026 07:00:00 -0500", 90.0),
        (NOON, LATER, None),
        (LATER, None, None),
        ("0", None, None),
        ("-5", None, None),
        ("nan", None, None),
        ("inf", None, None),
        ("9" * 10_000_000, None, None),
        ("-1e999", None, None),
        ("soon", NOON, None),
        ("Mon, 30 Nov 99999999999999999999 12:00:00 GMT", NOON, None),
        ("Mon, 30 Nov 2026 12:00:00 +99999999999999999999", NOON, None),
        (LATER, "Mon, 30 Nov 99999999999999999999 12:00:00 GMT", None),
        ("", None, None),
        (None, None, None),
    ],
)
def test_a_header_means_seconds_or_nothing(
    header: str | None, sent: str | None, seconds: float | None
) -> None:
    assert pause_asked(header, sent) == seconds


def test_a_server_that_asks_for_another_pause_each_time_costs_no_memory() -> None:
    clients, _ = translate("s3://bucket/run", options_for("http://127.0.0.1:1"))
    pauses = (1e-6 * nth for nth in itertools.count(1))
    requests = Requests("s3://bucket/run", clients, lambda writes: next(pauses))

    def refused(client: Any) -> None:
        raise GenericError("status code: 503 Slow Down")

    for _ in range(50):
        with pytest.raises(ServerBusy):
            requests.ask(refused)
        time.sleep(0.001)
    assert len(requests._made) <= 2


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def url(server: Server) -> str:
    return f"s3://{server.bucket}/run-{uuid.uuid4().hex}"


@pytest.fixture
def store(url: str, proxy: Proxy) -> Store:
    limits = {"read_timeout": 10, "retries": {"max_attempts": 3}}
    options = {**options_for(proxy.url), "config_kwargs": limits}
    return open_store(url, options, unhurried=True)


def struck(proxy: Proxy, rule: Rule) -> list[Request]:
    return [request for request in proxy.log() if request.fault is rule.fault]


USES: dict[str, Any] = {
    "put": lambda store: store.put("g/y", b"1"),
    "put_new": lambda store: store.put_new("g/y", b"1"),
    "get": lambda store: store.get("g/x", limit=9),
    "read_into": lambda store: store.read_into("g/x", 0, memoryview(bytearray(1))),
    "upload": lambda store: store.upload("g/y", 3, source(b"123")),
    "a large upload": lambda store: store.upload("g/y", SIZE, source(DATA)),
    "link": lambda store: store.link("g/x", "g/y"),
    "delete": lambda store: store.delete("g/x"),
    "delete_many": lambda store: store.delete_many(["g/x", "g/y"]),
    "entries": lambda store: store.entries("g"),
    "folders": lambda store: store.folders(),
    "abort_uploads": lambda store: store.abort_uploads("g"),
}


@pytest.mark.parametrize("use", [name for name in USES if name != "abort_uploads"])
def test_what_is_put_off_is_sent_once_and_the_server_asked_for_how_long(
    store: Store, proxy: Proxy, use: str
) -> None:
    store.put("g/x", b"1")
    proxy.clear()
    proxy.on(retry_after(1000), times=math.inf)
    with pytest.raises(ServerBusy, match=r"503.*left alone for 1000 s") as caught:
        USES[use](store)
    assert caught.value.retry_after_s == 1000.0
    assert len(proxy.log()) == 2


@pytest.mark.parametrize("use", USES)
def test_nothing_is_sent_in_the_time_that_the_server_asked_for(
    store: Store, proxy: Proxy, use: str
) -> None:
    store.put("g/x", b"1")
    proxy.on(retry_after(1000), method="PUT", times=2)
    with pytest.raises(ServerBusy):
        store.put("g/y", b"1")
    proxy.clear()
    with pytest.raises(ServerBusy) as caught:
        USES[use](store)
    assert 900.0 < caught.value.retry_after_s <= 1000.0
    assert proxy.log() == []


def test_after_that_time_the_same_store_works(store: Store, proxy: Proxy) -> None:
    rule = proxy.on(retry_after(1), method="PUT", times=2)
    with pytest.raises(ServerBusy):
        store.put("g/y", b"1")
    while True:
        try:
            store.put("g/y", b"1")
            break
        except ServerBusy as error:
            time.sleep(error.retry_after_s)
    *_, refused, taken = proxy.log()
    assert rule.struck == 2
    assert taken.at_s - refused.at_s >= 1.0
    assert store.get("g/y", limit=9) == b"1"


def test_asking_leaves_nothing_on_a_server_that_is_well(
    store: Store, proxy: Proxy, server: Server, url: str
) -> None:
    rule = proxy.on(retry_after(1000), method="PUT", times=1)
    store.put("g/y", b"1")  # by the time it was asked, the server did not mind any more
    assert rule.struck == 1
    prefix = url.removeprefix(f"s3://{server.bucket}/")
    assert server.keys(prefix) == [f"{prefix}/g/y"]
    assert server.uploads(prefix) == []


@pytest.mark.parametrize("fault", [SLOW_DOWN, Reset(), Answer(status=500)])
def test_a_server_that_asks_for_nothing_is_tried_again(
    store: Store, proxy: Proxy, fault: Any
) -> None:
    rule = proxy.on(fault, method="PUT", times=3)
    store.put("g/x", b"1")
    assert rule.struck == 3
    assert store.get("g/x", limit=9) == b"1"


def test_parts_that_are_put_off_end_the_first_upload_and_later_ones_wait_as_asked(
    store: Store, proxy: Proxy, server: Server, url: str
) -> None:
    part: dict[str, Any] = {"method": "PUT", "query": "partNumber"}
    rule = proxy.on(retry_after(1), **part, times=math.inf)
    with pytest.raises(ServerBusy) as caught:
        store.upload("g/shard", SIZE, source(DATA))
    assert rule.struck <= 3 * 3 + 1
    assert server.uploads(url.removeprefix(f"s3://{server.bucket}/")) == []
    time.sleep(caught.value.retry_after_s)
    proxy.clear()
    rule = proxy.on(retry_after(1), **part, nth=2)
    store.upload("g/shard", SIZE, source(DATA))
    (refused,) = struck(proxy, rule)
    number = refused.query.partition("partNumber=")[2][0]
    first, again = proxy.log(query=f"partNumber={number}")
    assert first is refused
    assert again.at_s - first.at_s >= 1.0
    assert len(proxy.log("POST", query="uploads")) == 1
    found = bytearray(SIZE)
    assert store.read_into("g/shard", 0, memoryview(found)) == SIZE
    assert found == DATA


def test_a_large_upload_that_a_passing_fault_ends_is_sent_again(store: Store, proxy: Proxy) -> None:
    rule = proxy.on(Reset(), method="PUT", query="partNumber=2", times=4)
    store.upload("g/shard", SIZE, source(DATA))
    assert rule.struck == 4
    assert len(proxy.log("POST", query="uploads")) == 2


def test_a_hurried_caller_is_not_held_up(url: str, proxy: Proxy) -> None:
    hurried = open_store(url, options_for(proxy.url))
    rules = [proxy.on(retry_after(1000), method=method, times=2) for method in ("PUT", "GET")]
    hurried.put("g/x", b"1")
    assert hurried.get("g/x", limit=9) == b"1"
    assert [rule.struck for rule in rules] == [2, 2]
    assert len(proxy.log()) == 6


def test_the_way_through_s3fs_hands_on_what_the_server_asks_for(url: str, proxy: Proxy) -> None:
    once = {"config_kwargs": {"retries": {"max_attempts": 0}}}
    store = open_fsspec(url, {**options_for(proxy.url), **once})
    proxy.on(retry_after(1000), times=math.inf)
    with pytest.raises(ServerBusy, match=r"g/x.*left alone for 1000 s") as caught:
        store.entries("g/x")
    assert caught.value.retry_after_s == 1000.0
    proxy.clear()
    proxy.on(Answer(status=500, headers=(("Retry-After", "1000"),)), times=math.inf)
    with pytest.raises(StorageError) as other:
        store.entries("g/x")
    assert not isinstance(other.value, ServerBusy)
