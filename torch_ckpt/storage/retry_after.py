"""How long a server asks to be left alone: HTTP's `Retry-After`, where a client shows it.

Knows the header, and where botocore keeps it in an error. Knows nothing of stores or of waiting.
"""

from __future__ import annotations

import math
from email.utils import parsedate_to_datetime
from typing import Any

LONGEST_S = 3600.0
"""A server that asks for more is asked again after this: it may have meant something else."""
_REFUSALS = (429, 503)


def pause_asked(header: str | None, sent: str | None = None) -> float | None:
    """The seconds that a `Retry-After` means; None if it means none, or nothing.

    A date counts from when the answer was `sent`, its `Date`, by the same clock.
    """
    seconds = _seconds(header or "", sent or "")
    return min(seconds, LONGEST_S) if seconds > 0.0 else None


def pause_asked_by(error: BaseException) -> float | None:
    """The same, of the refusal that an error of botocore, or one that came of it, stands for."""
    seen: BaseException | None = error
    while seen is not None:
        response: Any = getattr(seen, "response", None)
        if isinstance(response, dict):
            meta = response.get("ResponseMetadata", {})
            headers = meta.get("HTTPHeaders", {})
            if meta.get("HTTPStatusCode") in _REFUSALS:
                return pause_asked(headers.get("retry-after"), headers.get("date"))
        seen = seen.__cause__
    return None


def _seconds(header: str, sent: str) -> float:
    try:
        seconds = float(header)
    except ValueError:
        try:
            return (parsedate_to_datetime(header) - parsedate_to_datetime(sent)).total_seconds()
        except (TypeError, ValueError, OverflowError):  # no dates, one without its zone, no year
            return 0.0
    return seconds if math.isfinite(seconds) else 0.0
