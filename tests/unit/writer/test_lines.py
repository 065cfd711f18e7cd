"""What an encoder asks storage before it builds on generations: little, and all of it at once."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults import FaultyStore
from torch_ckpt.errors import SaveFailed, StorageError
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.retention import KeepLast
from torch_ckpt.manifest.commit import publish_manifest
from torch_ckpt.manifest.layout import folder_name
from torch_ckpt.manifest.schema import Manifest
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.writer.encode import Encoder, Encoding
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.persist import Watch, persist
from torch_ckpt.writer.rules import rules_of
from torch_ckpt.writer.share import Share
from torch_ckpt.writer.tier_options import TierOptions
from torch_ckpt.writer.tiers import Tiers

SIZE = 1 << 19  # elements: a tensor with a block of its own


class Saves:
    """Saves of one rank by an encoder, through a store that counts and fails on demand."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.store = FaultyStore(LocalStore(str(root)))
        self.encoder = Encoder(Encoding(incremental=True, **options))
        self.weight = np.random.default_rng(0).standard_normal(SIZE, np.float32)

    def save(
        self,
        step: int,
        *,
        seen: list[str] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        **facts: Any,
    ) -> Manifest:
        """Change a little and commit; `seen` gets the folders whose manifests were read first.

        `meanwhile` happens once the shard is durable.
        """
        self.weight *= np.float32(1 + 1e-4)
        slab = memoryview(bytearray(self.weight.tobytes()))
        shape = [SIZE]
        job = Job(
            root=self.store.url,
            folder=facts.pop("folder", folder_name(step)),
            step=step,
            attempt=facts.pop("attempt", f"{step:08x}"),
            run="r" * 8,
            rank=0,
            world_size=1,
            created="2026-01-01T00:00:00.000+00:00",
            pieces=[["w", "float32", shape, [0], shape, 0]],
            raw_bytes=len(slab),
            **facts,
        )
        share = Share(self.encoder, late=False)
        nobody = Watch(
            released=lambda: None,
            confirmed=meanwhile,
            abandoned=lambda: None,
            keep=share.keep,
        )
        before = len(self.store.calls)
        with ThreadPoolExecutor(2) as pool:
            try:
                manifest = persist(job, slab, self.store, pool, nobody, share.write)
            except SaveFailed:
                share.failed()
                raise
        self.last = job, manifest, share.holds
        calls = self.store.calls[before:]
        created = next(i for i, (operation, _) in enumerate(calls) if operation == "create")
        if seen is not None:
            seen += [
                name.partition("/")[0]
                for operation, name in calls[:created]
                if operation == "get" and name.endswith("/manifest.json")
            ]
        return manifest


@pytest.mark.parametrize("lossy", [None, 0.05])
def test_a_manifest_is_read_at_most_once_before_a_save_that_builds_on_it(
    tmp_path: Path, lossy: float | None
) -> None:
    saves = Saves(tmp_path, rules=rules_of("raw", None, lossy)[1], full_every=8)
    for step in range(1, 7):
        seen: list[str] = []
        manifest = saves.save(step, seen=seen)
        assert len(seen) == len(set(seen)) <= step - 1
        assert {folder_name(one) for one in manifest.bases} <= set(seen)
        assert len(manifest.bases) == step - 1


def test_storage_that_does_not_say_what_is_there_costs_one_full_generation(tmp_path: Path) -> None:
    saves = Saves(tmp_path, full_every=8)
    assert [saves.save(step).bases for step in (1, 2)] == [(), (1,)]
    saves.store.fail("get", nth=1, error=StorageError(5, "no answer"))
    assert [saves.save(step).bases for step in (3, 4)] == [(), (3,)]


@pytest.mark.parametrize("lossy", [None, 0.05])
def test_what_is_permanent_stands_alone_and_those_after_it_build_on_it(
    tmp_path: Path, lossy: float | None
) -> None:
    rules = rules_of("zstd", None, lossy)[1]
    saves = Saves(tmp_path, codec="zstd", rules=rules, full_every=4)
    for step in (1, 2, 3):
        saves.save(step)
    seen: list[str] = []
    assert saves.save(4, tags={"permanent": ""}, seen=seen).bases == ()
    assert seen == [], "nothing was asked, since nothing is built on"
    assert [saves.save(step).bases for step in (5, 6, 7, 8)] == [
        (4,),
        (4, 5),
        (4, 5, 6),
        (4, 5, 6, 7),
    ]
    (permanent,) = [one for one in Catalog(saves.store).committed() if one.step == 4]
    assert "lossy" not in permanent.tags
    assert [one.name for one in tmp_path.glob("step-0000000004/*.blocks")], "zstd, as asked for"


def test_multiples_that_an_archive_keeps_for_ever_stand_alone(tmp_path: Path) -> None:
    saves = Saves(tmp_path, permanent_every=(4, 6), full_every=8)
    assert [saves.save(step).bases for step in range(1, 8)] == [
        (),
        (1,),
        (1, 2),
        (),
        (4,),
        (),
        (6,),
    ]


def test_a_base_that_goes_between_the_shard_and_the_commit_costs_that_save(tmp_path: Path) -> None:
    saves = Saves(tmp_path, full_every=8)
    for step in (1, 2):
        saves.save(step)
    with pytest.raises(SaveFailed, match="step 1 in step-0000000001, which is not committed"):
        saves.save(3, meanwhile=lambda: shutil.rmtree(tmp_path / folder_name(1)))
    assert not list(tmp_path.glob("step-0000000003/*")), "and nothing of it is left"
    assert [saves.save(step).bases for step in (4, 5)] == [(), (4,)]


def test_a_save_under_a_users_name_leaves_the_line_its_base(tmp_path: Path) -> None:
    saves = Saves(tmp_path, full_every=8)
    assert [
        saves.save(step, folder=name).bases for step, name in [(1, "step-0000000001"), (2, "best")]
    ] == [(), (1,)]
    assert [saves.save(step).bases for step in (3, 4)] == [(1,), (1, 3)]


def test_the_archives_thread_prunes_nothing_that_a_save_under_way_builds_on(tmp_path: Path) -> None:
    saves, said = Saves(tmp_path / "root", full_every=8), queue.Queue[dict[str, Any]]()
    options = TierOptions(world_size=1, archive=str(tmp_path / "archive"))
    tiers = Tiers(options, rank=0, primary=lambda: saves.store, report=said.put)
    try:
        saves.save(1)
        job, manifest, held = saves.last
        tiers.voted(job, manifest, saves.store, held=held)
        saves.save(2, folder="best.ckpt", tags={"permanent": ""})
        job, manifest, held = saves.last
        tiers.voted(job, manifest, saves.store, held=held)
        assert [said.get(timeout=60)["reason"] for _ in range(2)] == [None, None]
        rule = KeepLast(1)
        prune = lambda: tiers.prune_primary(saves.store, rule, job.run)  # noqa: E731
        assert saves.save(3, meanwhile=prune).bases == (1,)
        assert {one.step for one in Catalog(saves.store).committed()} >= {1, 3}
        job, manifest, held = saves.last
        tiers.voted(job, manifest, saves.store, held=held)
        assert said.get(timeout=60)["reason"] is None
        assert saves.save(4, meanwhile=prune, tags={"permanent": ""}).bases == ()
    finally:
        tiers.finish(lambda: True)


def test_a_base_whose_step_was_saved_again_and_damaged_is_not_lost(tmp_path: Path) -> None:
    root, said = LocalStore(str(tmp_path / "root")), queue.Queue[dict[str, Any]]()
    Saves(tmp_path / "root").save(1)
    other, beside = Saves(tmp_path / "root"), "step-0000000001-000000b1"
    other.save(1, folder=beside, attempt="000000b1")
    assert other.save(2).bases == (1,)
    first = Catalog(root).find(folder="step-0000000001")
    publish_manifest(root, first.folder, first.manifest.with_tags({"damaged": "by somebody"}))
    options = TierOptions(world_size=1, archive=str(tmp_path / "archive"))
    tiers = Tiers(options, rank=0, primary=lambda: root, report=said.put)
    try:
        heard = [said.get(timeout=60) for _ in range(2)]
    finally:
        tiers.finish(lambda: True)
    assert {(one["attempt"], one["reason"]) for one in heard} == {
        ("000000b1", None),
        ("00000002", None),
    }
