"""What may happen to a request on its way, which requests it happens to, and what is noted of each.

Data for `proxy.py`. Knows nothing of connections.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Point = Literal["head", "upload", "answer", "download"]
"""Before the server hears of it; half of the request's body sent on; the server has answered in
full and the client has nothing; half of the answer's body sent on."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer in the server's place; `at="answer"`: after it did what was asked."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    at: Point = "head"


@dataclass(frozen=True, kw_only=True)
class Reset:
    """Reset the connection (RST), or close it in an orderly way."""

    at: Point = "head"
    orderly: bool = False


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Say nothing for a while, then go on."""

    seconds: float
    at: Point = "head"


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Change one bit in the middle of the request's or of the answer's body."""

    at: Literal["upload", "download"]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Send a signal to a process, then reset the connection."""

    pid: int | Callable[[], int]
    at: Point = "head"
    signal: int = signal.SIGKILL


Fault = Answer | Reset | Stall | Flip | Kill


def error_body(code: str) -> bytes:
    """What S3 says of an error."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>injected</Message><RequestId>0</RequestId></Error>"
    ).encode()


_XML = (("Content-Type", "application/xml"),)
SLOW_DOWN = Answer(status=503, body=error_body("SlowDown"), headers=_XML)
INTERNAL_ERROR = Answer(status=500, body=error_body("InternalError"), headers=_XML)
DENIED = Answer(status=403, body=error_body("AccessDenied"), headers=_XML)
ERROR_WITH_200 = Answer(status=200, body=error_body("InternalError"), headers=_XML)


def retry_after(seconds: int) -> Answer:
    """A 503 that says when to come back."""
    headers = (*_XML, ("Retry-After", str(seconds)))
    return Answer(status=503, body=error_body("SlowDown"), headers=headers)


@dataclass(kw_only=True)
class Request:
    """One line of the log; numbers grow until the exchange has ended."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    at_s: float
    """When it came, by the monotonic clock."""
    sent: int = 0
    """Bytes of its body that came from the client."""
    received: int = 0
    """Bytes of the answer's body that were given to the client."""
    status: int | None = None
    """What the client was told, if anything."""
    fault: Fault | None = None

    @property
    def key(self) -> str:
        """The path without its bucket."""
        return self.path.lstrip("/").partition("/")[2]


@dataclass(kw_only=True)
class Rule:
    """Which requests meet a fault: matching ones number `nth` to `nth + times - 1`."""

    fault: Fault
    method: str | None
    path: re.Pattern[str]
    query: re.Pattern[str]
    nth: int = 1
    times: float = 1
    met: int = 0
    """Requests that matched so far."""
    struck: int = 0
    """Those of them that met the fault."""

    def matches(self, request: Request) -> bool:
        return (
            self.method in {None, request.method}
            and self.path.search(request.path) is not None
            and self.query.search(request.query) is not None
        )

    def strikes(self, request: Request) -> bool:
        """Count a request; whether it is one of those that meet the fault."""
        if not self.matches(request):
            return False
        self.met += 1
        hit = self.nth <= self.met < self.nth + self.times
        self.struck += hit
        return hit
