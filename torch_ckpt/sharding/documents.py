"""The parts of a generation on all ranks, each read from storage by one of them.

A thousand ranks that all read a thousand parts would ask storage a million times. Knows ranks,
stores and parts. Knows nothing of tensors in memory.
"""

from __future__ import annotations

from torch_ckpt.errors import DisagreementError, IntegrityError
from torch_ckpt.manifest.commit import in_order, part_from, parts_bytes
from torch_ckpt.manifest.schema import Manifest, Part
from torch_ckpt.sharding.agree import Ranks
from torch_ckpt.sharding.broadcast import PeerFailed
from torch_ckpt.storage.store import Store


def parts_together(store: Store, folder: str, manifest: Manifest, ranks: Ranks) -> list[Part]:
    """As `read_parts`; all ranks call it with the same manifest, whose digests each one checks.

    Raises:
        PeerFailed: another rank could not read its share.
        DisagreementError: what a rank sent is not what arrived here.
        IntegrityError, FormatError, FileNotFoundError: as `read_parts`.
    """
    mine = manifest.parts[ranks.rank :: ranks.world_size]
    found: dict[str, bytes] = {}
    failure: Exception | None = None
    try:
        for stored, data in zip(mine, parts_bytes(store, folder, mine), strict=True):
            found[stored.name] = data
    except Exception as error:  # the others must hear of it, whatever it is
        failure = error
    if ranks.any(failure is not None):
        raise failure or PeerFailed("another rank could not read its share of the parts")
    parts = []
    for number, stored in enumerate(manifest.parts):
        reader = number % ranks.world_size
        data = ranks.broadcast(found.pop(stored.name, None), stored.bytes, reader)
        try:
            if failure is None:
                parts.append(part_from(data, store, folder, stored))
        except Exception as error:  # not yet: the others would wait for this rank
            failure = error
            if isinstance(error, IntegrityError):  # no damage: it was whole when it was sent
                failure = DisagreementError(
                    f"{stored.name} did not arrive on rank {ranks.rank} as rank {reader} sent it; "
                    "look at the network between them, and start again"
                )
    if failure is not None:
        raise failure
    return in_order(store, folder, manifest, parts)
