"""The parts of a generation on all ranks, each read from storage and checked by one of them.

A thousand ranks that all read a thousand parts would ask storage a million times, and check each
part a thousand times. What passes between them are parts in a form that costs little to take to
pieces. Knows ranks, stores and parts. Knows nothing of tensors in memory.
"""

from __future__ import annotations

from torch_ckpt.errors import DisagreementError
from torch_ckpt.manifest.commit import parts_of, whole_of
from torch_ckpt.manifest.digest import xxh3_hex
from torch_ckpt.manifest.packed import Unpacking, pack
from torch_ckpt.manifest.schema import Manifest, Part
from torch_ckpt.manifest.whole import Whole
from torch_ckpt.sharding.agree import Ranks
from torch_ckpt.sharding.broadcast import PeerFailed
from torch_ckpt.storage.store import Store


def parts_together(store: Store, folder: str, manifest: Manifest, ranks: Ranks) -> Whole:
    """As `read_whole`; all ranks call it with the same manifest, and each checks a share.

    Raises:
        PeerFailed: another rank could not read its share, or refused it.
        DisagreementError: what a rank sent is not what arrived here.
        IntegrityError, FormatError, FileNotFoundError: as `read_whole`.
    """
    share = manifest.parts[ranks.rank :: ranks.world_size]
    mine, failure = b"", None
    try:
        mine = b"".join(map(pack, parts_of(store, folder, share)))
    except Exception as error:  # the others must hear of it, whatever it is
        failure = error
    sent = ranks.gather(None if failure else (len(mine), xxh3_hex(mine)))
    if failure is not None or None in sent:
        raise failure or PeerFailed("another rank could not read its share of the parts")
    parts: list[Part] = []
    unpacking = Unpacking()
    for reader, (size, digest) in enumerate(sent):
        if not size:
            continue
        data = ranks.broadcast(mine if reader == ranks.rank else None, size, reader)
        try:
            parts += _taken(unpacking, data, digest, reader, ranks.rank)
        except Exception as error:  # not yet: the others would wait for this rank
            failure = failure or error
    if failure is not None:
        raise failure
    return whole_of(store, folder, manifest, parts)


def _taken(
    unpacking: Unpacking, data: memoryview, digest: str, reader: int, rank: int
) -> list[Part]:
    """The parts that a rank has sent; what is wrong with them is no damage of a generation."""
    if xxh3_hex(data) != digest:
        raise DisagreementError(
            f"the parts that rank {reader} has read did not arrive on rank {rank} as they were "
            "sent; look at the network between them, and start again"
        )
    try:
        return list(unpacking.parts(data))
    except (LookupError, TypeError, ValueError) as error:
        raise DisagreementError(
            f"the parts of rank {reader} cannot be taken to pieces on rank {rank}; give all ranks "
            f"one version of torch-ckpt ({error!r})"
        ) from error
