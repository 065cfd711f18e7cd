"""What a coordinator reads of another rank's part: the ends of the document, not its tensors.

A part of 1,000 tensors is hashed in a fraction of a millisecond and parsed in tens of them, and
there may be a thousand parts. Knows how a part is laid out as text. Knows nothing of stores.
"""

from __future__ import annotations

import json

from torch_ckpt.errors import FormatError
from torch_ckpt.manifest.parse import parse_vote
from torch_ckpt.manifest.schema import Vote

_HEAD_LIMIT_BYTES = 4 << 20
"""Rules by which something is lost and names of what is borrowed can take many kilobytes."""
_AFTER_HEAD = b',"blocks":['
_LAST = b',"per_rank":'
# Neither can be inside a JSON string, where a quote is escaped.


def vote_in(data: bytes, *, file: str) -> Vote | None:
    """The vote in a part; None if the document is not whole, as while it is being written.

    Cut short anywhere, or with a hole of zeros, it is not whole.

    Raises:
        FormatError: it is whole, and not a part that this version writes.
    """
    if not _is_whole(data):
        return None
    end = data.find(_AFTER_HEAD, 0, _HEAD_LIMIT_BYTES)
    if end < 0:
        raise FormatError(file=file, reason="does not begin with the fields of a vote")
    return parse_vote(data[:end] + b"}", file=file)


def _is_whole(data: bytes) -> bool:
    """Whether the last field is there and closed, and nothing was left out."""
    if b"\0" in data:
        return False
    decoder = json.JSONDecoder()
    end = len(data)
    while (start := data.rfind(_LAST, 0, end)) >= 0:
        end = start
        try:
            tail = str(data[start + len(_LAST) :], "ascii")
            value, stop = decoder.raw_decode(tail)
        except ValueError:
            return False
        if type(value) is dict and tail[stop:] == "}":
            return True
        # Otherwise this was a key in somebody's state, and the field is further up.
    return False
