"""Moments as 8-bit codes, computed on the device where they live: about a quarter is to be copied.

The same codes and scales, bit for bit, as the codecs `fp8` and `fp8-sqrt` give, which is proved on
every device before it is relied on. Codes come first in the room of a piece, its scales right
behind. Knows tensors and the codecs' arithmetic. Knows nothing of streams, slabs or the writer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from torch_ckpt.codecs.floats import GROUP, KINDS, LARGEST_POWER, groups_of
from torch_ckpt.codecs.fp8 import ESCAPED, LEAST
from torch_ckpt.manifest.blocks import has_own_blocks
from torch_ckpt.manifest.digest import xxh3_hex
from torch_ckpt.staging.regions import dtype_name
from torch_ckpt.staging.snapshot import Source

logger = logging.getLogger(__name__)

DEVICES = {"cuda"}
"""Kinds of devices from which less is copied so."""

_CHUNK = 2 << 20
"""Elements coded at once: what lies between takes up to 28 bytes of each."""

_MAGNITUDE = 0x7FFFFFFF
_LEAST_MAXIMUM_BITS = (127 - 118) << 23
_FRACTION, _FRACTION_OF_448 = (1 << 23) - 1, 0x600000
_NORMAL_BITS = (127 - 6) << 23
_SUBNORMAL_SHIFT, _SUBNORMAL_SHIFT_BITS = 2.0**14, (127 + 14) << 23

_SAMPLE_GROUPS = 96
PROOF = {
    ("float32", "fp8"): "8541b8699b20988a",
    ("bfloat16", "fp8"): "bcb68a9595a6c82b",
    ("float16", "fp8"): "6d60809f26c3461c",
    ("float32", "fp8-sqrt"): "309133624b8e5921",
    ("bfloat16", "fp8-sqrt"): "a716263c9be63cf7",
    ("float16", "fp8-sqrt"): "2f4ef76f603babfc",
}
"""XXH3 of what the codecs make of the sample of each element type."""


def coded(numbers: torch.Tensor, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of contiguous numbers and the scale of each group; of escaped groups any codes.

    In terms of bits, which every device orders and adds alike.
    """
    roots, power = codec == "fp8-sqrt", LARGEST_POWER[KINDS[dtype_name(numbers.dtype)]]
    wide = numbers.reshape(-1).float()  # exact
    if roots:
        wide = wide.double().sqrt_().float()  # rounded as by IEEE 754; some float32 roots are not
    count = wide.numel()
    if missing := -count % GROUP:
        wide = torch.nn.functional.pad(wide, (0, missing))
    groups = wide.view(-1, GROUP)
    largest = (groups.view(torch.int32) & _MAGNITUDE).amax(dim=1)
    scales = _scales(largest, (127 + (power // 2 if roots else power)) << 23)
    inverse = ((254 - scales.clamp(max=253)) << 23).view(torch.float32)
    bits = (groups * inverse[:, None]).view(torch.int32)
    codes = _rounded(bits, never_to_zero=roots).view(-1)[:count]
    return codes, scales.to(torch.uint8)


def _scales(largest: torch.Tensor, ceiling: int) -> torch.Tensor:
    """Of each group the exponent field of the least power of two by which it fits into 448."""
    fields = (largest >> 23) - 8 + ((largest & _FRACTION) > _FRACTION_OF_448).int()
    usable = (largest >= _LEAST_MAXIMUM_BITS) & (largest < ceiling)
    scales = torch.where(usable, fields, ESCAPED)
    return torch.where(largest == 0, LEAST, scales)


def _rounded(bits: torch.Tensor, *, never_to_zero: bool) -> torch.Tensor:
    """Codes of the nearest e4m3 numbers, ties to even, of scaled ones; uses up `bits`."""
    signs = ((bits >> 24) & 0x80).to(torch.uint8)
    bits &= _MAGNITUDE
    small = (bits.view(torch.float32) + _SUBNORMAL_SHIFT).view(torch.int32)
    small -= _SUBNORMAL_SHIFT_BITS
    if never_to_zero:
        small = torch.maximum(small, (bits != 0).int())
    normal = bits.clamp_(min=_NORMAL_BITS)
    normal += ((normal >> 20) & 1) + 0x7FFFF
    normal >>= 20
    normal -= (127 - 7) << 3
    return torch.minimum(small, normal).to(torch.uint8) | signs


def sample(dtype: str) -> torch.Tensor:
    """Numbers whose codes tell devices apart: all scales, ties, denormals, and what is escaped."""
    count = _SAMPLE_GROUPS * GROUP - 5
    index = torch.arange(count, dtype=torch.int64, device="cpu")
    noise = (index * 2654435761 & 0xFFFFFFFF) ^ (index * 40503 & 0xFFFF) << 7
    group = index // GROUP
    mantissa = torch.where(noise & 0x300 == 0, noise & 0x700000, noise & _FRACTION)
    exponent = (group * 3 - noise % 29).clamp(0, 255)
    if dtype == "float16":  # whose exponents are fewer
        exponent = (112 + group * 32 // _SAMPLE_GROUPS - noise % 9).clamp(0, 143)
    sign = torch.where(group % 2 == 0, noise >> 31 & 1, 0)
    word = sign << 31 | exponent << 23 | mantissa
    word = torch.where(index % 911 == 0, 1 << 31, word)  # -0.0
    word = torch.where(index % 1777 == 1, 0x7F800000 | noise & 1, word)  # an infinity, a NaN
    bits = torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
    return bits.view(torch.float32).to(getattr(torch, dtype))


def fingerprint(codes: torch.Tensor, scales: torch.Tensor) -> str:
    """One digest of all that a reader would see of codes and scales."""
    codes, scales = codes.cpu(), scales.cpu()
    kept = (scales != ESCAPED).repeat_interleave(GROUP)[: codes.numel()]
    return xxh3_hex(torch.cat([codes * kept, scales]).numpy().data)


class Quantiser:
    """Codes tensors on devices that have been proved to do it as the codecs do."""

    def __init__(self) -> None:
        self._usable: dict[torch.device, bool] = {}

    def code(self, live: torch.Tensor, codec: str, room: torch.Tensor) -> bool:
        """Write codes and scales into the room of a piece, in bytes.

        False where the device does not compute as the codecs do, or has no memory left.
        """
        device = live.device
        try:
            if device not in self._usable:
                self._usable[device] = _proved(device)
            if self._usable[device]:
                _write(live, codec, room)
        except torch.OutOfMemoryError:
            logger.warning(
                "%s has no memory left to code moments: from now on they are copied whole", device
            )
            self._usable[device] = False
        return self._usable[device]


def _proved(device: torch.device) -> bool:
    """Whether a device computes as the codecs do; waits for it."""
    for (dtype, codec), digest in PROOF.items():
        if fingerprint(*coded(sample(dtype).to(device), codec)) != digest:
            logger.warning(
                "%s does not compute %s of %s as the writer does: moments are copied whole from "
                "it, and the writer encodes them",
                device,
                codec,
                dtype,
            )
            return False
    return True


def _write(live: torch.Tensor, codec: str, room: torch.Tensor) -> None:
    at, scales = 0, []
    for part in live.view(-1).split(_CHUNK):
        codes, of_part = coded(part, codec)
        room[at : at + codes.numel()].copy_(codes, non_blocking=True)
        at += codes.numel()
        scales.append(of_part)
    room[at : at + groups_of(at)].copy_(torch.cat(scales), non_blocking=True)


class Coding:
    """The coding of one snapshot: which of its sources became codes."""

    def __init__(self, quantiser: Quantiser, codec_of: Callable[[str], str | None]) -> None:
        """`codec_of` says by a tensor's name how it may be coded."""
        self._quantiser, self._codec_of = quantiser, codec_of
        self._done: dict[int, tuple[Source, str, torch.Tensor]] = {}

    def wants(self, source: Source) -> bool:
        """Whether a source may be coded, as far as its name, place and type tell.

        A group of 128 is the same here and in the writer's blocks, since the piece has its own.
        """
        live, piece = source.live, source.place.piece
        if live.device.type not in DEVICES or piece.dtype not in KINDS:
            return False
        plain = live.is_contiguous() and not live.is_neg()
        return plain and has_own_blocks(piece) and self._codec_of(source.name) is not None

    def code(self, source: Source, room: torch.Tensor) -> bool:
        """Code a source into its room; False where it has to be copied whole."""
        codec = self._codec_of(source.name)
        if codec is None or not self._quantiser.code(source.live, codec, room):
            return False
        self._done[source.place.start] = source, codec, room
        return True

    def escaped(self) -> Iterator[Source]:
        """Sources with a group that codes cannot hold, which are to be copied whole after all.

        To be asked once everything has arrived.
        """
        for start, (source, _, room) in list(self._done.items()):
            count = source.live.numel()
            if bool((room[count : count + groups_of(count)] == ESCAPED).any()):
                del self._done[start]
                yield source

    @property
    def quantised(self) -> list[tuple[int, str]]:
        """Where pieces lie that are codes, and of which codec."""
        return [(start, codec) for start, (_, codec, _) in sorted(self._done.items())]

    @property
    def spared(self) -> int:
        """Bytes that did not have to be copied."""
        counts = [(s.place.piece.bytes, s.live.numel()) for s, _, _ in self._done.values()]
        return sum(size - count - groups_of(count) for size, count in counts)
