"""Which codec a part means by a name. The one place where all of them meet."""

from __future__ import annotations

from torch_ckpt.codecs.codec import Codec
from torch_ckpt.codecs.delta import Delta
from torch_ckpt.codecs.fp8 import Fp8, Fp8Sqrt
from torch_ckpt.codecs.planes import Planes
from torch_ckpt.codecs.residual import LossyDelta

_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Planes(), Delta(), Fp8(), Fp8Sqrt(), LossyDelta())
}

NAMES: tuple[str, ...] = tuple(_CODECS)
"""Every codec that this release reads; `raw` is none."""


def codec_named(name: str) -> Codec:
    """The codec that a part calls `name`, with its default settings: reading needs no others.

    Raises:
        ValueError: this release has no codec of that name.
    """
    try:
        return _CODECS[name]
    except KeyError:
        raise ValueError(
            f"there is no codec {name!r} in this release, only {', '.join(NAMES)}; a later one may "
            "have it"
        ) from None
