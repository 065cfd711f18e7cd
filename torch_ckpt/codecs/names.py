"""Which codec a part means by a name. The one place where all of them meet.

A codec is imported when it is asked for: who reads documents alone needs no arrays.
"""

from __future__ import annotations

import functools
import importlib

from torch_ckpt.codecs.codec import Codec

_CODECS = {
    "zstd": ("planes", "Planes"),
    "delta": ("delta", "Delta"),
    "fp8": ("fp8", "Fp8"),
    "fp8-sqrt": ("fp8", "Fp8Sqrt"),
    "lossy-delta": ("residual", "LossyDelta"),
}
"""Module and class by name."""

NAMES: tuple[str, ...] = tuple(_CODECS)
"""Every codec that this release reads; `raw` is none."""

NEED_BASE = frozenset({"delta", "lossy-delta"})
"""Those that decode a block against an earlier one."""


@functools.cache
def codec_named(name: str) -> Codec:
    """The codec that a part calls `name`, with its default settings: reading needs no others.

    Raises:
        ValueError: this release has no codec of that name.
    """
    if name not in _CODECS:
        raise ValueError(
            f"there is no codec {name!r} in this release, only {', '.join(NAMES)}; a later one may "
            "have it"
        )
    module, kind = _CODECS[name]
    return getattr(importlib.import_module(f"torch_ckpt.codecs.{module}"), kind)()
