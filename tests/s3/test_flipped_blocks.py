"""A bit that flips on the way from an object store is found before anyone sees the block."""

from __future__ import annotations

import math

import pytest

from tests import samples
from tests.s3.proxy import Proxy
from tests.s3.rules import Flip
from tests.s3.servers import Server, options_for
from torch_ckpt.errors import IntegrityError
from torch_ckpt.generations.read import BlockReader
from torch_ckpt.manifest.commit import read_parts
from torch_ckpt.storage.store import open_store


def test_a_block_with_a_flipped_bit_is_refused(moto_server: Server, prefix: str) -> None:
    with Proxy(moto_server.endpoint_url) as proxy:
        store = open_store(f"s3://{moto_server.bucket}/{prefix}", options_for(proxy.url))
        generation = samples.commit(store, 3)
        (part,) = read_parts(store, generation.folder, generation.manifest)
        reader = BlockReader(store, generation.folder, part)
        scratch = memoryview(bytearray(max(block.bytes for block in part.blocks)))
        whole = [bytes(reader.read(index, scratch)) for index in range(len(part.blocks))]
        rule = proxy.on(Flip(at="download"), method="GET", times=math.inf)
        for index, block in enumerate(part.blocks):
            with pytest.raises(IntegrityError, match=part.files[block.file].name):
                reader.read(index, scratch)
        assert rule.struck == 2 * len(part.blocks)  # read once more before it counts as damaged
        proxy.clear()
        assert [bytes(reader.read(i, scratch)) for i in range(len(part.blocks))] == whole
