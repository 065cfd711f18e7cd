"""SHA-256 for trust, xxh3 for a quick check of decoded bytes, and canonical JSON.

Knows bytes. Knows nothing of files or documents.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import xxhash

Bytes = bytes | bytearray | memoryview


def sha256_hex(data: Bytes) -> str:
    """SHA-256 as 64 lower-case hex digits; drops the GIL for anything larger than 2 KiB."""
    return hashlib.sha256(data).hexdigest()


def xxh3_hex(data: Bytes) -> str:
    """XXH3, 64 bit, seed 0, as 16 lower-case hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def ordered_json(document: Any) -> bytes:
    """ASCII JSON without white space whose objects keep their order, as the dicts of a state must.

    Raises:
        ValueError: a float is nan or infinite; the object encoding spells those out.
    """
    return json.dumps(document, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode(
        "ascii"
    )


def canonical_json(document: Any) -> bytes:
    """ASCII JSON with sorted keys and no white space: one document, one sequence of bytes.

    Raises:
        ValueError: a float is nan or infinite; the object encoding spells those out.
    """
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")
