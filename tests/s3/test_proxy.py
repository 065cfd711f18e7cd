"""Each fault of the proxy does what it says, to the request that it is for, and to no other."""

from __future__ import annotations

import http.client
import math
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from tests.s3.proxy import Proxy
from tests.s3.rules import (
    DENIED,
    ERROR_WITH_200,
    INTERNAL_ERROR,
    SLOW_DOWN,
    Answer,
    Flip,
    Kill,
    Reset,
    Stall,
    retry_after,
)

BODY = bytes(range(256)) * 4096
Asked = Callable[..., tuple[int, bytes]]


class Upstream(ThreadingHTTPServer):
    """Keeps what is PUT, by path; GET gives it back, with chunks if the query asks for them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.held: dict[str, bytes] = {}
        self.puts = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: connections break here by design."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_PUT(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            size = int(self.headers["Content-Length"])
            body = self.rfile.read(size)
            if len(body) < size:
                return
        self.server.puts += 1
        self.server.held[self.path] = body
        self._give(201, b"stored")

    def do_GET(self) -> None:
        self._give(200, self.server.held.get(self.path.partition("?")[0], b""))

    do_HEAD = do_GET

    def _give(self, status: int, body: bytes) -> None:
        self.send_response(status)
        chunked = "chunked" in self.path
        self.send_header(
            *(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(body))))
        )
        self.end_headers()
        if self.command == "HEAD":
            return
        if chunked:
            half = len(body) // 2
            body = b"".join(
                b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:])
            )
            body += b"0\r\n\r\n"
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[Proxy]:
    with Proxy(f"http://127.0.0.1:{upstream.server_port}") as proxy:
        yield proxy


def address_of(proxy: Proxy) -> tuple[str, int]:
    return "127.0.0.1", urlsplit(proxy.url).port or 0


@pytest.fixture
def client(proxy: Proxy) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(*address_of(proxy), timeout=10)
    yield connection
    connection.close()


@pytest.fixture
def ask(client: http.client.HTTPConnection) -> Asked:
    """One request over a connection that is kept between requests; status and body."""

    def ask(method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        try:
            client.request(method, path, body, headers)
            answer = client.getresponse()
            return answer.status, answer.read()
        except Exception:
            client.close()
            raise

    return ask


def test_what_no_rule_is_for_passes_unchanged(ask: Asked, proxy: Proxy) -> None:
    assert ask("PUT", "/b/some%20key?x=1", BODY) == (201, b"stored")
    assert ask("GET", "/b/some%20key") == (200, b"")
    assert ask("PUT", "/b/k", BODY) == (201, b"stored")
    assert ask("GET", "/b/k") == (200, BODY)
    assert ask("GET", "/b/k?chunked") == (200, BODY)
    assert ask("HEAD", "/b/k") == (200, b"")
    first, *_, head = proxy.log()
    assert (first.method, first.path, first.key, first.query) == (
        "PUT",
        "/b/some key",
        "some key",
        "x=1",
    )
    assert (first.sent, first.received, first.status, first.fault) == (len(BODY), 6, 201, None)
    assert (head.method, head.received, head.status) == ("HEAD", 0, 200)
    assert [request.key for request in proxy.log("PUT", "k$")] == ["k"]


def test_bodies_in_chunks_pass_unchanged(
    client: http.client.HTTPConnection, upstream: Upstream
) -> None:
    client.request("PUT", "/c", iter([BODY, b"x", BODY]), encode_chunked=True)
    assert client.getresponse().read() == b"stored"
    assert upstream.held["/c"] == BODY + b"x" + BODY


def test_a_client_that_waits_for_100_continue_gets_it(proxy: Proxy, upstream: Upstream) -> None:
    with socket.create_connection(address_of(proxy), timeout=10) as raw:
        raw.sendall(
            b"PUT /e HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        assert raw.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(b"ok")
        assert raw.recv(100).startswith(b"HTTP/1.1 201")
    assert upstream.held["/e"] == b"ok"


@pytest.mark.parametrize("answer", [SLOW_DOWN, INTERNAL_ERROR, DENIED, ERROR_WITH_200])
def test_an_answer_in_the_servers_place_keeps_the_request_from_it(
    ask: Asked, proxy: Proxy, upstream: Upstream, answer: Answer
) -> None:
    proxy.on(answer, method="PUT")
    assert ask("PUT", "/k", BODY) == (answer.status, answer.body)
    assert upstream.puts == 0
    assert ask("PUT", "/k", BODY) == (201, b"stored")
    assert [request.fault for request in proxy.log()] == [answer, None]


def test_rules_choose_by_method_path_query_and_number(ask: Asked, proxy: Proxy) -> None:
    rule = proxy.on(SLOW_DOWN, method="GET", path="^/b/.*7$", query="part=", nth=2, times=2)
    statuses = [ask("GET", "/b/17?part=1")[0] for _ in range(5)]
    assert statuses == [200, 503, 503, 200, 200]
    assert (rule.met, rule.struck) == (5, 2)
    assert ask("GET", "/b/18?part=1")[0] == ask("GET", "/b/17")[0] == 200
    assert rule.met == 5
    proxy.on(DENIED, times=math.inf)
    assert [ask("GET", "/b/1")[0] for _ in range(3)] == [403] * 3
    proxy.clear()
    assert proxy.log() == []
    assert ask("GET", "/b/1")[0] == 200


def test_retry_after_is_a_header(client: http.client.HTTPConnection, proxy: Proxy) -> None:
    proxy.on(retry_after(7))
    client.request("GET", "/k")
    answer = client.getresponse()
    assert (answer.status, answer.headers["Retry-After"]) == (503, "7")
    assert b"<Code>SlowDown</Code>" in answer.read()


def test_an_error_after_the_commit_comes_when_the_server_has_stored(
    ask: Asked, proxy: Proxy, upstream: Upstream
) -> None:
    proxy.on(Answer(status=500, at="answer"))
    assert ask("PUT", "/k", BODY) == (500, b"")
    assert upstream.held["/k"] == BODY


def test_a_reset_before_the_request_hides_it_from_the_server(
    ask: Asked, proxy: Proxy, upstream: Upstream
) -> None:
    proxy.on(Reset())
    with pytest.raises(ConnectionResetError):
        ask("PUT", "/k", b"small")
    assert upstream.puts == 0


def test_a_reset_in_the_body_gives_the_server_half_of_it(
    ask: Asked, proxy: Proxy, upstream: Upstream
) -> None:
    proxy.on(Reset(at="upload"))
    with pytest.raises(OSError):
        ask("PUT", "/k", BODY)
    assert proxy.log()[0].sent == len(BODY) // 2
    assert upstream.puts == 0


def test_a_lost_answer_leaves_what_the_server_committed(
    ask: Asked, proxy: Proxy, upstream: Upstream
) -> None:
    proxy.on(Reset(at="answer"))
    with pytest.raises(ConnectionResetError):
        ask("PUT", "/k", BODY)
    assert upstream.held["/k"] == BODY


@pytest.mark.parametrize("query", ["", "?chunked"])
def test_a_download_is_cut_or_reset_in_its_middle(ask: Asked, proxy: Proxy, query: str) -> None:
    ask("PUT", "/k", BODY)
    proxy.on(Reset(at="download", orderly=True), method="GET")
    proxy.on(Reset(at="download"), method="GET", nth=1)
    with pytest.raises(http.client.IncompleteRead) as cut:
        ask("GET", f"/k{query}")
    if not query:
        assert cut.value.partial == BODY[: len(BODY) // 2]
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        ask("GET", f"/k{query}")
    assert ask("GET", f"/k{query}") == (200, BODY)


@pytest.mark.parametrize("query", ["", "?chunked"])
def test_one_bit_of_a_download_flips(ask: Asked, proxy: Proxy, query: str) -> None:
    ask("PUT", "/k", BODY)
    proxy.on(Flip(at="download"), method="GET")
    status, body = ask("GET", f"/k{query}")
    assert (status, len(body)) == (200, len(BODY))
    assert sum((a ^ b).bit_count() for a, b in zip(body, BODY, strict=True)) == 1


def test_one_bit_of_an_upload_flips(ask: Asked, proxy: Proxy, upstream: Upstream) -> None:
    proxy.on(Flip(at="upload"))
    assert ask("PUT", "/k", BODY)[0] == 201
    held = upstream.held["/k"]
    assert sum((a ^ b).bit_count() for a, b in zip(held, BODY, strict=True)) == 1


@pytest.mark.parametrize("at", ["head", "upload", "answer", "download"])
def test_a_stall_ends_after_its_time(ask: Asked, proxy: Proxy, at: str) -> None:
    proxy.on(Stall(at=at, seconds=0.3))  # pyright: ignore[reportArgumentType]
    start = time.monotonic()
    assert ask("PUT", "/k", BODY) == (201, b"stored")
    assert time.monotonic() - start >= 0.3


def test_a_stalled_request_that_nobody_waits_for_does_not_arrive_late(
    proxy: Proxy, upstream: Upstream
) -> None:
    proxy.on(Stall(seconds=0.3))
    with socket.create_connection(address_of(proxy)) as raw:
        raw.sendall(b"PUT /k HTTP/1.1\r\nContent-Length: 2\r\n\r\nok")
    time.sleep(0.5)
    assert upstream.puts == 0


def test_leaving_ends_what_is_stalled(upstream: Upstream) -> None:
    with Proxy(f"http://127.0.0.1:{upstream.server_port}") as proxy:
        proxy.on(Stall(seconds=3600))
        raw = socket.create_connection(address_of(proxy), timeout=10)
        raw.sendall(b"GET /k HTTP/1.1\r\n\r\n")
        while not proxy.log():
            time.sleep(0.01)
    with raw:
        assert raw.recv(1) == b""


@pytest.mark.parametrize(("at", "stored"), [("head", False), ("answer", True)])
def test_a_process_is_killed_at_the_request_that_was_named(
    ask: Asked, proxy: Proxy, upstream: Upstream, at: str, stored: bool
) -> None:
    victim = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    proxy.on(Kill(pid=lambda: victim.pid, at=at), nth=2)  # pyright: ignore[reportArgumentType]
    assert ask("PUT", "/1", b"1")[0] == 201
    assert victim.poll() is None
    with pytest.raises(ConnectionResetError):
        ask("PUT", "/2", b"2")
    assert victim.wait(10) == -signal.SIGKILL
    assert ("/2" in upstream.held) == stored
    assert victim.stdin is not None
    victim.stdin.close()
