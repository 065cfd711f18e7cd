"""Other ways to make blocks smaller, one thread each: those that can be imported.

Knows their interfaces. Knows nothing of ours.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any, NamedTuple


class Peer(NamedTuple):
    """A pair of functions on bytes; `prepare` makes what `encode` may spoil, outside the clock."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    prepare: Callable[[memoryview], Any] = bytes


def peers(dtype: str, itemsize: int) -> dict[str, Peer | None]:
    """Every peer by name; None where it is not installed."""
    return {
        "zstd-3": _zstd(3),
        "DCP zstd": _dcp(),
        "blosc2 shuffle+zstd": _blosc2(itemsize),
        "zipnn": _zipnn(dtype),
    }


def _zstd(level: int) -> Peer:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=level)
    return Peer(compressor.compress, zstandard.ZstdDecompressor().decompress)


def _dcp() -> Peer | None:
    try:
        from torch.distributed.checkpoint._extension import ZStandard
    except ImportError:
        return None
    extension = ZStandard()

    def encode(raw: bytes) -> bytes:
        out = _StaysOpen()
        with extension.transform_to(out) as stream:
            stream.write(raw)
        return out.getvalue()

    def decode(stored: bytes) -> bytes:
        return extension.transform_from(io.BytesIO(stored)).read()

    return Peer(encode, decode)


class _StaysOpen(io.BytesIO):
    """Closing the stream ends the frame, as DCP's writer does; what was written stays here."""

    def close(self) -> None: ...


def _blosc2(itemsize: int) -> Peer | None:
    try:
        blosc2: Any = importlib.import_module("blosc2")
    except ImportError:  # also of what its newest releases import and do not ask for
        return None
    options = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filters": [blosc2.Filter.SHUFFLE]}

    def encode(raw: bytes) -> bytes:
        return blosc2.compress2(raw, typesize=itemsize, nthreads=1, **options)

    return Peer(encode, lambda stored: blosc2.decompress2(stored, nthreads=1))


def _zipnn(dtype: str) -> Peer | None:
    try:
        zipnn: Any = importlib.import_module("zipnn")
    except ImportError:
        return None
    coder = zipnn.ZipNN(bytearray_dtype=dtype, input_format="byte", threads=1)
    return Peer(coder.compress, coder.decompress, bytearray)  # it works in the caller's memory
