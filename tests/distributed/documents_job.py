"""What ranks do that open one generation together, some of them with faults.

All return plain values for the tests to judge. Knows the engine's documents.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.load import Opened
from torch_ckpt.manifest.digest import sha256_hex, xxh3_hex
from torch_ckpt.sharding.agree import Ranks
from torch_ckpt.storage.local import LocalStore


class Asked(LocalStore):
    """Notes what is read, and fails as it is told."""

    def __init__(self, root: str, fault: str | None) -> None:
        super().__init__(root)
        self.names: list[str] = []
        self._fault = fault

    def get(self, name: str, *, limit: int) -> bytes:
        self.names.append(name.split("/")[-1])
        data = super().get(name, limit=limit)
        if name.endswith(".json") and "rank-" in name:
            if self._fault == "unreadable":
                raise OSError("not readable")
            if self._fault == "changed":
                return data[:-1] + b" "
        return data

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        self.names.append(name.split("/")[-1])
        return super().read_into(name, offset, target)


class BadLine(Ranks):
    """Ranks of which this one does not get what others send."""

    def broadcast(self, data: bytes | None, size: int, source: int) -> memoryview:
        passed = super().broadcast(data, size, source)
        if data is None:
            passed[7] ^= 1
        return passed


class OtherVersion(Ranks):
    """Ranks of which this one sends what the others cannot take to pieces."""

    SENT = b"\x02" + bytes(7) + b"[]"

    def gather(self, value: Any) -> list[Any]:
        sent = isinstance(value, tuple)
        return super().gather((len(self.SENT), xxh3_hex(self.SENT)) if sent else value)

    def broadcast(self, data: bytes | None, size: int, source: int) -> memoryview:
        return super().broadcast(None if data is None else self.SENT, size, source)


RANKS = {"on the way": BadLine, "another version": OtherVersion}


def opened(rank: int, root: str, faults: dict[int, str]) -> dict[str, Any]:
    """Open the only generation with all ranks; what this one has read, and what it knows."""
    fault = faults.get(rank)
    store = Asked(root, fault)
    generation = Catalog(store).find(step=5)
    if fault == "another size":
        manifest = replace(generation.manifest, bytes=1)
        generation = replace(generation, manifest=manifest)
    store.names.clear()
    ranks = RANKS.get(str(fault), Ranks)(None, timeout_s=30)
    try:
        found = Opened(store, generation, ranks=ranks)
    finally:
        ranks.close()
    return {
        "ranks": [part.rank for part in found.parts],
        "digest": sha256_hex(b"".join(part.dump() for part in found.parts)),
        "asked": store.names,
    }
