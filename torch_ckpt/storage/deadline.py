"""A deadline for every request of s3fs, which has none for a server that takes no bytes.

Knows aiobotocore, whose uploads wait without a timer for the server's leave to send. Knows nothing
of stores.
"""

from __future__ import annotations

import inspect
from typing import Any

DEADLINE_S = 120.0
"""Of one request, including its part of at most some 16 MiB."""


def with_deadline(storage_options: dict[str, Any]) -> dict[str, Any]:
    """Options for s3fs with a deadline in them, unless they name a session of their own."""
    import aiohttp
    from aiobotocore.config import AioConfig
    from aiobotocore.httpsession import AIOHTTPSession

    config: dict[str, Any] = dict(storage_options.get("config_kwargs") or {})
    takes_session = "http_session_cls" in inspect.signature(AioConfig.__init__).parameters
    if "http_session_cls" in config or not takes_session:  # old releases have no such option
        return storage_options
    # What the user allows a server between two bytes is, as in our other client, what a whole
    # request may take; but never so little that a part could not be sent.
    total = max(float(config.get("read_timeout") or DEADLINE_S), 1.0)

    class Session(AIOHTTPSession):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            given = self._timeout
            self._timeout = aiohttp.ClientTimeout(
                total=total, sock_connect=given.sock_connect, sock_read=given.sock_read
            )

    config["http_session_cls"] = Session
    return {**storage_options, "config_kwargs": config}
