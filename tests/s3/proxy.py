"""A proxy for HTTP on the loopback address that breaks the requests it is told to break.

Requests and answers pass byte for byte, so signatures stay valid. A rule chooses requests by
method, path, query and number; its fault says at which point of the exchange what happens. Every
request is in `log()`. Knows HTTP/1.1 as clients of object stores speak it, nothing of objects.

    with Proxy(server.endpoint_url) as proxy:
        proxy.on(SLOW_DOWN, method="PUT", nth=2, times=3)
        proxy.on(Reset(at="answer"), query="uploadId")   # committed, but nobody is told
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from tests.s3.rules import Answer, Fault, Flip, Kill, Point, Request, Reset, Rule, Stall

_PIECE = 64 << 10


@dataclass(frozen=True)
class _Side:
    """A connection, to the client or to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def message(self) -> tuple[bytes, list[str], dict[str, str]]:
        """The head of a request or an answer: its bytes, first line and headers."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":")[::2] for line in lines if line)
        return head, first.split(" ", 2), {name.lower(): value.strip() for name, value in pairs}

    def reset(self) -> None:
        opened = self.writer.get_extra_info("socket")
        with suppress(OSError):  # it is gone already
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class _Broken(Exception):
    """The fault ended the connection."""


_GONE = (_Broken, OSError, EOFError, asyncio.CancelledError)


class Proxy:
    """Listens in a thread of its own while it is entered. Rules may come and go meanwhile."""

    def __init__(self, upstream: str) -> None:
        address = urlsplit(upstream)
        self._upstream = (address.hostname, address.port)
        self.url = ""
        self._log: list[Request] = []
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Proxy:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy")
        self._thread.start()
        listen = asyncio.start_server(self._serve, "127.0.0.1", limit=_PIECE)
        self._server = asyncio.run_coroutine_threadsafe(listen, self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def on(
        self,
        fault: Fault,
        *,
        method: str | None = None,
        path: str = "",
        query: str = "",
        nth: int = 1,
        times: float = 1,
    ) -> Rule:
        """Add a rule, which sees what no earlier one strikes; `times=math.inf` is for ever.

        `path` (unquoted) and `query` (as sent) are searched for as regular expressions.
        """
        rule = Rule(
            fault=fault,
            method=method,
            path=re.compile(path),
            query=re.compile(query),
            nth=nth,
            times=times,
        )
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget the rules and the log; what has begun to stall goes on stalling."""
        with self._lock:
            self._rules.clear()
            self._log.clear()

    def log(self, method: str | None = None, path: str = "", query: str = "") -> list[Request]:
        """The requests so far that match, in the order in which they came."""
        with self._lock:
            found = list(self._log)
        wanted = Rule(fault=Reset(), method=method, path=re.compile(path), query=re.compile(query))
        return [request for request in found if wanted.matches(request)]

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        client = _Side(reader, writer)
        with suppress(*_GONE):
            while await self._exchange(client):
                pass
        with suppress(OSError, asyncio.CancelledError):
            writer.close()
            await writer.wait_closed()
        writer.transport.abort()
        self._tasks.discard(task)

    async def _exchange(self, client: _Side) -> bool:
        """Pass on one request and its answer; whether the connection is good for another one."""
        head, first, headers = await client.message()
        request = self._noted(first[0], first[1], headers)
        fault = request.fault
        waits = "100-continue" in headers.get("expect", "").lower()
        if isinstance(fault, Answer) and fault.at == "head":
            if not waits:
                async for piece, is_data in _body(client.reader, headers):
                    request.sent += len(piece) * is_data
            await _answer(client, fault, request)
            return not waits
        await _strike(fault, "head", client)
        if waits:
            await client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        server = _Side(*await asyncio.open_connection(*self._upstream, limit=_PIECE))
        try:
            await server.send(head)
            async for piece in _struck(_body(client.reader, headers), fault, "upload", client):
                request.sent += len(piece)
                with suppress(OSError):  # a server may answer, and hang up, before it has it all
                    await server.send(piece)
            return await _relay_answer(server, client, request)
        finally:
            server.writer.transport.abort()

    def _noted(self, method: str, target: str, headers: dict[str, str]) -> Request:
        """Put a request into the log, with the fault that it is to meet."""
        path, _, query = target.partition("?")
        request = Request(
            method=method,
            path=unquote(path),
            query=query,
            headers=headers,
            at_s=time.monotonic(),
        )
        with self._lock:
            self._log.append(request)
            struck = next((rule for rule in self._rules if rule.strikes(request)), None)
            request.fault = struck.fault if struck else None
        return request


async def _relay_answer(server: _Side, client: _Side, request: Request) -> bool:
    head, first, headers = await server.message()
    while first[1].startswith("1"):  # the client has had its `100 Continue`
        head, first, headers = await server.message()
    has_body = request.method != "HEAD" and first[1] not in {"204", "304"}
    body = _body(server.reader, headers if has_body else {}, to_the_end=has_body)
    fault = request.fault
    if fault is not None and fault.at == "answer" and not isinstance(fault, Stall):
        async for _ in body:  # now the server is done with it, whatever that took
            pass
        if isinstance(fault, Answer):
            await _answer(client, fault, request)
            return True
    await _strike(fault, "answer", client)
    request.status = int(first[1])
    await client.send(head)
    async for piece in _struck(body, fault, "download", client):
        await client.send(piece)
        request.received += len(piece)
    framed = not has_body or {"content-length", "transfer-encoding"} & headers.keys()
    return bool(framed) and first[0] == "HTTP/1.1" and headers.get("connection") != "close"


async def _answer(client: _Side, answer: Answer, request: Request) -> None:
    request.status = answer.status
    body = b"" if request.method == "HEAD" else answer.body
    lines = [f"HTTP/1.1 {answer.status} Injected", f"Content-Length: {len(answer.body)}"]
    lines += [f"{name}: {value}" for name, value in answer.headers]
    await client.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)


async def _strike(fault: Fault | None, point: Point, client: _Side) -> None:
    """Do what a fault does at this point, if this is its point."""
    if fault is None or fault.at != point or isinstance(fault, (Answer, Flip)):
        return
    if isinstance(fault, Stall):
        await asyncio.sleep(fault.seconds)
        if client.reader._eof or client.reader.exception():  # pyright: ignore[reportAttributeAccessIssue]
            raise _Broken  # nobody waits any more, so nothing must arrive late
        return
    if isinstance(fault, Kill):
        os.kill(fault.pid if isinstance(fault.pid, int) else fault.pid(), fault.signal)
    if isinstance(fault, Kill) or not fault.orderly:
        client.reset()
    raise _Broken


async def _struck(
    pieces: AsyncIterator[tuple[bytes, bool]], fault: Fault | None, point: Point, client: _Side
) -> AsyncIterator[bytes]:
    """The pieces of a body, with the fault in its middle if that is its point."""
    struck = fault is None or fault.at != point
    async for piece, is_middle in pieces:
        if is_middle and not struck:
            struck = True
            await _strike(fault, point, client)
            if isinstance(fault, Flip):
                piece = bytes([piece[0] ^ 1]) + piece[1:]
        yield piece
    if not struck:  # there was no body
        await _strike(fault, point, client)


async def _body(
    reader: asyncio.StreamReader, headers: dict[str, str], *, to_the_end: bool = False
) -> AsyncIterator[tuple[bytes, bool]]:
    """The pieces of a body as they are on the wire, and whether one begins in its middle.

    The middle of a chunked body is where its first chunk begins: its length is not known.
    """
    if "chunked" in headers.get("transfer-encoding", "").lower():
        size = None
        while size != 0:
            line = await reader.readuntil(b"\r\n")
            yield line, False
            first, size = size is None, int(line.split(b";")[0], 16)
            async for piece in _exactly(reader, size):
                yield piece, first
                first = False
            while line != b"\r\n":  # what follows the chunk, or the trailers
                line = await reader.readuntil(b"\r\n")
                yield line, False
                if size:
                    break
    elif "content-length" in headers:
        size = int(headers["content-length"])
        async for piece in _exactly(reader, size // 2):
            yield piece, False
        first = True
        async for piece in _exactly(reader, size - size // 2):
            yield piece, first
            first = False
    elif to_the_end:
        while piece := await reader.read(_PIECE):
            yield piece, False


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size:
        piece = await reader.read(min(size, _PIECE))
        if not piece:
            raise asyncio.IncompleteReadError(b"", size)
        size -= len(piece)
        yield piece
