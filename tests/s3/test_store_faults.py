"""Whatever happens to one request, a store's operation has worked, or says in time that it has not.

Every operation is run against a server behind the fault proxy, once for each kind of its requests
and each fault. Afterwards the server is looked at by another way: what the operation was for is
there as it should be, or what was there before is; nothing is half there, no multipart upload is
left, and the same operation works as soon as the fault is over.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.s3.proxy import Proxy
from tests.s3.rules import (
    DENIED,
    ERROR_WITH_200,
    INTERNAL_ERROR,
    SLOW_DOWN,
    Answer,
    Fault,
    Flip,
    Reset,
    Stall,
)
from tests.s3.servers import Server, options_for
from torch_ckpt.errors import StorageError
from torch_ckpt.storage.remote import open_fsspec
from torch_ckpt.storage.store import Entry, Store, open_store

IN_TIME_S = 45.0
"""Bounded, also on a busy machine: a deadline of 2 to 4 s, four attempts, pauses."""
HURRIED = {"connect_timeout": 1, "read_timeout": 2, "retries": {"max_attempts": 3}}

SMALL, OLD = b"a small document", b"what was there before"
LARGE = random.Random(0).randbytes((16 << 20) + 123_457)
"""Two parts."""
HELD = {"f/old": OLD, "f/older": OLD}


def source(offset: int, target: memoryview) -> int:
    target[:] = LARGE[offset : offset + len(target)]
    return len(target)


def stream(store: Store) -> None:
    sink = store.create("f/new", len(LARGE))
    try:
        with memoryview(LARGE) as data:
            sink.write_at(0, data)
        sink.finish()
    except BaseException:
        sink.abandon()
        raise


def ranged(store: Store) -> bytes:
    target = bytearray(1 << 20)
    return bytes(target[: store.read_into("f/large", 1_000, memoryview(target))])


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What is asked of a store, and what is then to be found on the server."""

    run: Callable[[Store], object]
    requests: tuple[tuple[str, str], ...]
    """Method, and a pattern for the query, of each kind of request that it makes."""
    gives: object = None
    key: str = "f/new"
    after: bytes | None = None
    """What the key holds when it has worked, unless that is what it held before."""
    reads: bool = False
    large: bool = False
    """It needs a large object."""


ONE_PUT = (("PUT", ""),)
MULTIPART = (("POST", "^uploads"), ("PUT", "partNumber=1"), ("PUT", "partNumber=2"))
MULTIPART += (("POST", "uploadId"), ("HEAD", ""))

OPERATIONS = {
    "put": Operation(run=lambda s: s.put("f/new", SMALL), requests=ONE_PUT, after=SMALL),
    "put over another": Operation(
        run=lambda s: s.put("f/old", SMALL), requests=ONE_PUT, key="f/old", after=SMALL
    ),
    "put_new": Operation(
        run=lambda s: s.put_new("f/new", SMALL),
        requests=(*ONE_PUT, ("GET", "")),
        gives=True,
        after=SMALL,
    ),
    "put_new where another is": Operation(
        reads=True,
        run=lambda s: s.put_new("f/old", SMALL),
        requests=(("GET", ""),),
        gives=False,
        key="f/old",
    ),
    "get": Operation(
        reads=True, run=lambda s: s.get("f/old", limit=100), requests=(("GET", ""),), gives=OLD
    ),
    "read_into": Operation(
        reads=True,
        large=True,
        run=ranged,
        requests=(("GET", ""),),
        gives=LARGE[1_000 : 1_000 + (1 << 20)],
    ),
    "upload": Operation(
        run=lambda s: s.upload("f/new", len(LARGE), source), requests=MULTIPART, after=LARGE
    ),
    "upload in one": Operation(
        run=lambda s: s.upload("f/new", 1 << 20, source),
        requests=(*ONE_PUT, ("HEAD", "")),
        after=LARGE[: 1 << 20],
    ),
    "create": Operation(run=stream, requests=MULTIPART[:-1], after=LARGE),
    "delete": Operation(run=lambda s: s.delete("f/old"), requests=(("DELETE", ""),), key="f/old"),
    "delete_many": Operation(
        run=lambda s: s.delete_many(["f/old", "f/older"]),
        requests=(("POST", "^delete"),),
        key="f/old",
    ),
    "link": Operation(run=lambda s: s.link("f/old", "f/new"), requests=ONE_PUT, after=OLD),
    "entries": Operation(
        reads=True,
        run=lambda s: s.entries("f"),
        requests=(("GET", "list-type"),),
        gives=[Entry(name=key[2:], bytes=len(HELD[key])) for key in sorted(HELD)],
    ),
    "folders": Operation(
        reads=True, run=lambda s: s.folders(), requests=(("GET", "list-type"),), gives=["f"]
    ),
    "abort_uploads": Operation(
        reads=True, run=lambda s: s.abort_uploads("f"), requests=(("GET", "uploads"),), gives=0
    ),
}

ANY: tuple[str, ...] = ("GET", "HEAD", "PUT", "POST", "DELETE")


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A fault, and what is asked of a store that meets it."""

    fault: Fault
    times: int = 1
    methods: tuple[str, ...] = ANY
    query: str = ""
    """Only for requests whose pattern holds this."""
    overcome: bool = True
    """The operation works all the same."""


TROUBLES = {
    "503 once": Trouble(fault=SLOW_DOWN),
    "503 ten times": Trouble(fault=SLOW_DOWN, times=10, overcome=False),
    "500": Trouble(fault=INTERNAL_ERROR),
    "403": Trouble(fault=DENIED, overcome=False),
    "403 for good": Trouble(fault=DENIED, times=1_000, overcome=False),
    "error with status 200": Trouble(
        fault=ERROR_WITH_200, methods=("POST",), query="uploadId", overcome=False
    ),
    "reset before": Trouble(fault=Reset()),
    "reset in the upload": Trouble(fault=Reset(at="upload"), methods=("PUT",)),
    "reset in the download": Trouble(fault=Reset(at="download"), methods=("GET",)),
    "answer lost": Trouble(fault=Reset(at="answer")),
    "500 after the commit": Trouble(fault=Answer(status=500, at="answer")),
    "stall": Trouble(fault=Stall(seconds=60)),
    "stall in the upload": Trouble(fault=Stall(seconds=60, at="upload"), methods=("PUT",)),
    "stall before the answer": Trouble(fault=Stall(seconds=60, at="answer")),
    "stall in the download": Trouble(fault=Stall(seconds=60, at="download"), methods=("GET",)),
    "download cut": Trouble(fault=Reset(at="download", orderly=True), methods=("GET",)),
    "download flipped": Trouble(fault=Flip(at="download"), methods=("GET",), overcome=False),
    "upload flipped": Trouble(fault=Flip(at="upload"), methods=("PUT",), overcome=False),
}


class Scene:
    """A store behind the proxy, and the server as others see it."""

    def __init__(self, server: Server, proxy: Proxy, prefix: str, kind: str) -> None:
        self.server, self.proxy, self.prefix = server, proxy, prefix
        options = {**options_for(proxy.url), "config_kwargs": HURRIED}
        url = f"s3://{server.bucket}/{prefix}"
        self.store: Store = {"objects": open_store, "fsspec": open_fsspec}[kind](url, options)
        self.client = server.client()

    def reset(self, *, large: bool) -> None:
        """Make what the server holds what every operation begins with."""
        for key in self.server.keys(self.prefix + "/"):
            self.client.delete_object(Bucket=self.server.bucket, Key=key)
        held = {**HELD, "f/large": LARGE} if large else HELD
        for name, data in held.items():
            self.client.put_object(
                Bucket=self.server.bucket, Key=f"{self.prefix}/{name}", Body=data
            )

    def held(self, name: str) -> bytes | None:
        key = f"{self.prefix}/{name}"
        return self.server.body(key) if key in self.server.keys(key) else None


def scenes(server: Server, prefix: str, kind: str) -> Iterator[Scene]:
    with Proxy(server.endpoint_url) as proxy:
        scene = Scene(server, proxy, prefix, kind)
        yield scene
        for key in server.keys(prefix + "/"):
            scene.client.delete_object(Bucket=server.bucket, Key=key)


@pytest.fixture
def seaweed_scene(seaweed_server: Server, prefix: str, kind: str) -> Iterator[Scene]:
    yield from scenes(seaweed_server, prefix, kind)


@pytest.fixture
def moto_scene(moto_server: Server, prefix: str, kind: str) -> Iterator[Scene]:
    yield from scenes(moto_server, prefix, kind)


def cases() -> Iterator[tuple[str, tuple[str, str], str]]:
    for name, operation in OPERATIONS.items():
        for request in operation.requests:
            for trouble_name, trouble in TROUBLES.items():
                if request[0] in trouble.methods and trouble.query in request[1]:
                    yield name, request, trouble_name


def is_alike(name: str, request: tuple[str, str], trouble: str) -> bool:
    """Whether another case shows nearly the same in less time."""
    return (
        request == ("PUT", "partNumber=1")
        or (name == "create" and request != ("PUT", "partNumber=2"))
        or ("stall" in trouble and name in {"link", "folders", "put over another"})
        or trouble == "403 for good"
    )


def marked(case: tuple[str, tuple[str, str], str]) -> Any:
    mark = pytest.mark.sweep if is_alike(*case) else pytest.mark.s3
    return pytest.param(*case, marks=mark, id=named(case))


def named(case: tuple[str, tuple[str, str], str]) -> str:
    return " ".join(filter(None, (case[0], *case[1], case[2])))


def check(scene: Scene, name: str, request: tuple[str, str], trouble_name: str) -> None:
    operation, trouble = OPERATIONS[name], TROUBLES[trouble_name]
    scene.reset(large=operation.large)
    before = HELD.get(operation.key)
    after = before if operation.reads else operation.after
    rule = scene.proxy.on(trouble.fault, method=request[0], query=request[1], times=trouble.times)
    start, failure, gives = time.monotonic(), None, None
    try:
        gives = operation.run(scene.store)
    except StorageError as error:
        failure = error
    took = time.monotonic() - start
    assert rule.struck, [(r.method, r.path, r.query) for r in scene.proxy.log()]
    scene.proxy.clear()
    assert took < IN_TIME_S
    held = scene.held(operation.key)
    if failure is not None:
        assert not trouble.overcome, failure
        assert scene.prefix in str(failure)
        assert held in {before, after}
    else:
        # What was flipped on its way here is found by whoever knows its digest.
        assert gives == operation.gives or trouble.fault == Flip(at="download")
        assert held == after
    left = scene.server.uploads(scene.prefix + "/")
    if request == MULTIPART[0] and trouble.fault.at == "answer":
        # Nobody knows its id, so it takes a look at all of them.
        assert scene.store.abort_uploads("f") == len(left)
        left = scene.server.uploads(scene.prefix + "/")
    assert left == []
    scene.reset(large=operation.large)
    assert operation.run(scene.store) == operation.gives
    assert scene.held(operation.key) == after


@pytest.mark.parametrize("kind", ["objects"])
@pytest.mark.parametrize(("name", "request_kind", "trouble"), [marked(case) for case in cases()])
def test_an_operation_works_or_says_that_it_has_not(
    seaweed_scene: Scene, name: str, request_kind: tuple[str, str], trouble: str
) -> None:
    check(seaweed_scene, name, request_kind, trouble)


FALLBACK = ("put", "put_new", "get", "read_into", "upload", "entries")
FALLBACK_MEETS = ("503 once", "500", "403", "error with status 200", "reset before", "answer lost")
FALLBACK_MEETS += ("reset in the upload", "download cut", "stall", "upload flipped")


@pytest.mark.parametrize("kind", ["fsspec"])
@pytest.mark.parametrize(
    ("name", "request_kind", "trouble"),
    [marked(case) for case in cases() if case[0] in FALLBACK and case[2] in FALLBACK_MEETS],
)
def test_so_it_is_where_obstore_is_not_installed(
    seaweed_scene: Scene, name: str, request_kind: tuple[str, str], trouble: str
) -> None:
    check(seaweed_scene, name, request_kind, trouble)


IMITATED = [
    ("put", ("PUT", ""), "503 once"),
    ("put_new", ("PUT", ""), "answer lost"),
    ("put_new", ("PUT", ""), "500 after the commit"),
    ("get", ("GET", ""), "stall"),
    ("read_into", ("GET", ""), "download cut"),
    ("upload", ("PUT", "partNumber=2"), "403"),
    ("upload", ("PUT", "partNumber=2"), "reset in the upload"),
    ("upload", ("POST", "uploadId"), "error with status 200"),
    ("upload", ("POST", "uploadId"), "answer lost"),
    ("entries", ("GET", "list-type"), "500"),
]


@pytest.mark.parametrize("kind", ["objects"])
@pytest.mark.parametrize(
    ("name", "request_kind", "trouble"),
    IMITATED,
    ids=map(named, IMITATED),
)
def test_an_operation_works_or_says_so_to_an_imitated_server(
    moto_scene: Scene, name: str, request_kind: tuple[str, str], trouble: str
) -> None:
    check(moto_scene, name, request_kind, trouble)
