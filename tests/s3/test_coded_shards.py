"""A bit that flips in a shard that the archive stores in its own codec: when that is found.

A real trainer with `archive_codec`, whose archive is a bucket behind a proxy that breaks requests.
"""

from __future__ import annotations

import math
import shutil

from tests.s3.archived import Run, ask, end, until
from tests.s3.rules import SLOW_DOWN, Flip
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.verify import verify

OPTIONS = {"archive_codec": "zstd", "size": 2000}
"""A shard of a block or two: all of them are read back."""


def _damage(run: Run, step: int) -> None:
    """Flip a bit of the shard of a step in the bucket, past everybody."""
    store = run.archive
    folder = f"step-{step:010d}"
    (shard,) = [one for one in store.entries(folder) if one.name.endswith(".blocks")]
    data = bytearray(store.get(f"{folder}/{shard.name}", limit=shard.bytes))
    data[shard.bytes // 2] ^= 1
    store.put(f"{folder}/{shard.name}", bytes(data))


def test_a_bit_that_flips_on_the_way_of_a_coded_shard_is_found_before_its_part_is_there(
    run: Run,
) -> None:
    rule = run.proxy.on(Flip(at="upload"), method="PUT", path=r"\.blocks")
    run.train(1, **OPTIONS)
    assert rule.struck == 1
    assert run.steps() == [1]
    sent = [one.key.rpartition(".")[2] for one in run.requests() if one.method == "PUT"]
    assert sent.index("json", sent.index("blocks")) > sent.index("blocks", sent.index("blocks") + 1)
    run.assert_sound()


def test_a_coded_shard_that_is_damaged_once_it_was_read_back_is_committed_and_never_loaded(
    run: Run,
) -> None:
    trainer, _ = run.start(**OPTIONS)
    assert ask(trainer, "save", 1)["state"] == "committed"
    assert ask(trainer, "archived", 1)["error"] is None
    last = run.proxy.on(SLOW_DOWN, method="PUT", path="0002/manifest", times=math.inf)
    assert ask(trainer, "save", 2)["state"] == "committed"
    until(lambda: last.struck > 0)
    _damage(run, 2)
    run.proxy.clear()
    # Sizes alone are looked at between what is read back and the manifest.
    assert ask(trainer, "archived", 2)["error"] is None
    end(trainer)
    found = {one.step: one for one in Catalog(run.archive).committed()}
    assert {step: verify(run.archive, one).ok for step, one in found.items()} == {1: True, 2: False}

    # While the root has it, the archive's copy costs nothing.
    trainer, resumed = run.start(**OPTIONS)
    assert (resumed["step"], resumed["differs"]) == (2, [])
    end(trainer)

    # Without it, the generation before is resumed, and the archive's copy is marked.
    shutil.rmtree(run.root)
    trainer, resumed = run.start(**OPTIONS)
    assert (resumed["step"], resumed["differs"], resumed["error"]) == (1, [], None)
    assert any("0002" in line for line in resumed["log"]), resumed["log"]
    end(trainer)
    assert [one.step for one in Catalog(run.archive).committed() if "damaged" in one.tags] == [2]
