"""Whichever checksum an upload carries, a server that knows it refuses what changed on the way."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.s3.proxy import Proxy
from tests.s3.rules import Flip
from tests.s3.servers import Server, options_for
from torch_ckpt.errors import StorageError
from torch_ckpt.storage.objects import ObjectStore
from torch_ckpt.storage.store import open_store

LARGE = random.Random(0).randbytes((16 << 20) + 123_457)
"""Two parts."""
CRC = {"s3_additional_kwargs": {"ChecksumAlgorithm": "CRC64NVME"}}
UNSIGNED = {"config_kwargs": {"s3": {"payload_signing_enabled": False}}}


def source(offset: int, target: memoryview) -> int:
    target[:] = LARGE[offset : offset + len(target)]
    return len(target)


@pytest.mark.s3
@pytest.mark.parametrize("bytes_", [1 << 20, len(LARGE)], ids=["in one", "in parts"])
@pytest.mark.parametrize(
    "options", [{}, CRC, UNSIGNED, {**CRC, **UNSIGNED}], ids=["default", "crc", "unsigned", "both"]
)
def test_a_bit_that_flips_on_the_way_up_is_refused(
    seaweed_server: Server, prefix: str, options: dict[str, Any], bytes_: int
) -> None:
    with Proxy(seaweed_server.endpoint_url) as proxy:
        url = f"s3://{seaweed_server.bucket}/{prefix}"
        store = open_store(url, {**options_for(proxy.url), **options})
        assert isinstance(store, ObjectStore)
        rule = proxy.on(Flip(at="upload"), method="PUT")
        with pytest.raises(StorageError, match="BadDigest"):
            store.upload("f/new", bytes_, source)
        assert rule.struck
        assert seaweed_server.keys(prefix) == seaweed_server.uploads(prefix) == []
        proxy.clear()
        store.upload("f/new", bytes_, source)
        assert seaweed_server.body(f"{prefix}/f/new") == LARGE[:bytes_]
