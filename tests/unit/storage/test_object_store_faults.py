"""What a store on S3 makes of a server or a network that fails: an answer, an error, nothing else.

Through a proxy that breaks requests as ordered, in front of a server that imitates S3.
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Iterator

import pytest

from tests.s3.proxy import Proxy
from tests.s3.rules import (
    DENIED,
    ERROR_WITH_200,
    INTERNAL_ERROR,
    SLOW_DOWN,
    Answer,
    Fault,
    Reset,
    Stall,
    error_body,
    retry_after,
)
from tests.s3.servers import Server, options_for
from tests.suites.store_suite import source
from torch_ckpt.errors import StorageError
from torch_ckpt.storage.outgoing import PART_BYTES
from torch_ckpt.storage.store import Store, open_store

SIZE = 2 * PART_BYTES + 77
DATA = random.Random(2).randbytes(SIZE)
LOST = Reset(at="answer")
"""The server did what was asked, and the client never hears of it."""


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: Proxy, server: Server) -> Store:
    limits = {"read_timeout": 2, "retries": {"max_attempts": 2}}
    options = {**options_for(proxy.url), "config_kwargs": limits}
    return open_store(f"s3://{server.bucket}/run-{uuid.uuid4().hex}", options)


def below(store: Store, server: Server) -> str:
    return store.url.removeprefix(f"s3://{server.bucket}/")


@pytest.mark.parametrize(
    "fault",
    [LOST, Reset(), SLOW_DOWN, INTERNAL_ERROR, Stall(seconds=3.0)],
    ids=["lost", "reset", "slow down", "internal error", "stall"],
)
def test_a_claim_whose_answer_was_lost_is_ours(store: Store, proxy: Proxy, fault: Fault) -> None:
    rule = proxy.on(fault, method="PUT")
    assert store.put_new("RUN.json", b"our id")
    assert rule.struck == 1
    assert store.get("RUN.json", limit=10) == b"our id"


def test_a_claim_that_somebody_else_made_meanwhile_is_theirs(
    store: Store, proxy: Proxy, server: Server
) -> None:
    store.put("RUN.json", b"their id")
    # Our first look comes before theirs is there.
    rule = proxy.on(Answer(status=404, body=error_body("NoSuchKey")), method="GET")
    assert not store.put_new("RUN.json", b"our id")
    assert rule.struck == 1
    assert store.get("RUN.json", limit=10) == b"their id"
    assert server.body(f"{below(store, server)}/RUN.json") == b"their id"


def test_a_claim_that_is_forbidden_is_an_error_at_once(store: Store, proxy: Proxy) -> None:
    proxy.on(DENIED, method="PUT", times=math.inf)
    with pytest.raises(StorageError, match=r"RUN\.json.*AccessDenied.*permission"):
        store.put_new("RUN.json", b"our id")
    assert len(proxy.log("PUT")) == 1


@pytest.mark.parametrize(
    ("query", "method", "fault"),
    [
        ("partNumber=2", "PUT", SLOW_DOWN),
        ("partNumber=2", "PUT", INTERNAL_ERROR),
        ("partNumber=2", "PUT", Reset(at="upload")),
        ("partNumber=2", "PUT", LOST),
        pytest.param("partNumber=1", "PUT", Stall(seconds=5.0), marks=pytest.mark.slow),
        ("uploads", "POST", SLOW_DOWN),
        ("uploadId=", "POST", SLOW_DOWN),
        ("uploadId=", "POST", ERROR_WITH_200),
        # The answer to a completion was lost, and its repetition finds no upload any more.
        ("uploadId=", "POST", Answer(status=404, body=error_body("NoSuchUpload"), at="answer")),
    ],
    ids=[
        "part, slow down",
        "part, internal error",
        "part, reset",
        "part, lost",
        "part, stall",
        "begin, slow down",
        "complete, slow down",
        "complete, error with 200",
        "complete, lost and repeated",
    ],
)
def test_an_upload_survives_what_passes(
    store: Store, proxy: Proxy, server: Server, query: str, method: str, fault: Fault
) -> None:
    rule = proxy.on(fault, method=method, query=query)
    store.upload("g/shard", SIZE, source(DATA))
    assert rule.struck == 1
    assert server.body(f"{below(store, server)}/g/shard") == DATA
    assert server.uploads(below(store, server)) == []


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        pytest.param("partNumber=2", DENIED, id="part, denied"),
        pytest.param("partNumber=2", SLOW_DOWN, id="part, slow down", marks=pytest.mark.slow),
        pytest.param("uploads", DENIED, id="begin"),
        pytest.param("uploadId=[^&]*$", DENIED, id="complete, denied"),
        pytest.param(
            "uploadId=[^&]*$", SLOW_DOWN, id="complete, slow down", marks=pytest.mark.slow
        ),
    ],
)
def test_an_upload_that_cannot_be_leaves_nothing(
    store: Store, proxy: Proxy, server: Server, query: str, fault: Fault
) -> None:
    method = "PUT" if "part" in query else "POST"
    proxy.on(fault, method=method, query=query, times=math.inf)
    with pytest.raises(StorageError, match="g/shard"):
        store.upload("g/shard", SIZE, source(DATA))
    sink = store.create("g/shard", SIZE)
    with pytest.raises(StorageError, match="g/shard"):
        for start in range(0, SIZE, 1 << 20):
            sink.write_at(start, memoryview(DATA)[start : start + (1 << 20)])
        sink.finish()
    sink.abandon()
    assert server.keys(below(store, server)) == []
    assert server.uploads(below(store, server)) == []
    proxy.clear()
    store.upload("g/shard", SIZE, source(DATA))
    assert server.body(f"{below(store, server)}/g/shard") == DATA


def test_an_older_object_of_the_same_size_does_not_pass_for_a_new_one(
    store: Store, proxy: Proxy
) -> None:
    store.upload("g/shard", SIZE, source(bytes(SIZE)))
    proxy.on(Answer(status=404, body=error_body("NoSuchUpload")), query="uploadId=", method="POST")
    with pytest.raises(StorageError, match="NoSuchUpload"):
        store.upload("g/shard", SIZE, source(DATA))


def test_an_object_that_is_seen_with_another_size_is_removed(store: Store, proxy: Proxy) -> None:
    # An answer of the proxy's own has no length, which the client takes for none of the bytes.
    headers = (("Last-Modified", "Mon, 30 Nov 2026 01:03:19 GMT"), ("ETag", '"x"'))
    rule = proxy.on(Answer(status=200, headers=headers), method="HEAD")
    with pytest.raises(StorageError, match="0 bytes after an upload of 5"):
        store.upload("g/shard", 5, source(b"12345"))
    assert rule.struck == 1
    assert store.entries("g") == []


@pytest.mark.parametrize(
    "fault",
    [DENIED, INTERNAL_ERROR, SLOW_DOWN, Reset()],
    ids=["denied", "internal error", "slow down", "reset"],
)
def test_a_failure_is_never_taken_for_a_missing_name(
    store: Store, proxy: Proxy, fault: Fault
) -> None:
    store.put("g/x", b"1")
    for use in (
        lambda: store.get("g/x", limit=1),
        lambda: store.read_into("g/x", 0, memoryview(bytearray(1))),
        lambda: store.link("g/x", "g/y"),
        lambda: store.entries("g"),
        store.folders,
        lambda: store.delete_folder("g"),
        lambda: store.delete("g/x"),
        lambda: store.delete_many(["g/x", "g/y"]),
    ):
        proxy.clear()
        proxy.on(fault, times=math.inf)
        with pytest.raises(StorageError) as caught:
            use()
        assert not isinstance(caught.value, FileNotFoundError)
        assert "\n" not in str(caught.value)
    proxy.clear()
    assert store.get("g/x", limit=1) == b"1"


@pytest.mark.parametrize(
    "fault",
    [Reset(at="download"), Reset(at="download", orderly=True)],
    ids=["reset", "closed"],
)
def test_a_download_that_breaks_off_goes_on(store: Store, proxy: Proxy, fault: Fault) -> None:
    store.put("g/x", DATA[: 5 << 20])
    rule = proxy.on(fault, method="GET")
    found = bytearray(5 << 20)
    assert store.read_into("g/x", 0, memoryview(found)) == len(found)
    assert rule.struck == 1
    assert found == DATA[: 5 << 20]


def test_a_server_without_bulk_deletion_is_asked_for_each(store: Store, proxy: Proxy) -> None:
    for name in "abc":
        store.put(f"g/{name}", b"1")
    proxy.on(Answer(status=501, body=error_body("NotImplemented")), query="delete", times=math.inf)
    store.delete_many(["g/a", "g/b"])
    assert [entry.name for entry in store.entries("g")] == ["c"]


def test_a_server_that_asks_to_come_back_later_is_asked_again(store: Store, proxy: Proxy) -> None:
    rule = proxy.on(retry_after(1), method="PUT", times=2)
    store.put("g/x", b"1")
    assert rule.struck == 2
