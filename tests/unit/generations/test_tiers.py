"""Several roots are looked at as one: what one tier holds or says counts for all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import samples
from tests.faults import FaultyStore
from torch_ckpt.errors import StorageError
from torch_ckpt.generations.catalog import Generation
from torch_ckpt.generations.choose import choose
from torch_ckpt.generations.tiers import Survey, Tier, TierName, survey
from torch_ckpt.manifest.commit import update_tags
from torch_ckpt.storage.local import LocalStore
from torch_ckpt.storage.store import Store


@dataclass
class Roots:
    cache: Store
    primary: Store
    archive: Store

    def tiers(self) -> list[Tier]:
        names: tuple[TierName, ...] = ("archive", "primary", "cache")
        return [Tier(name=name, store=getattr(self, name)) for name in names]

    def commit(self, step: int, *names: str, attempt: str = "0123abcd") -> list[Generation]:
        return [samples.commit(getattr(self, name), step, attempt=attempt) for name in names]


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots(*(LocalStore(str(tmp_path / name)) for name in ("cache", "primary", "archive")))


def held(found: Survey) -> list[tuple[int, list[str]]]:
    return [(one.generation.step, list(one.tiers)) for one in found.held]


def test_every_generation_is_there_once_with_its_tiers_in_reading_order(roots: Roots) -> None:
    roots.commit(1, "archive")
    roots.commit(2, "archive", "primary")
    roots.commit(3, "primary", "cache", "archive")
    roots.commit(4, "cache")
    found = survey(roots.tiers())
    assert held(found) == [
        (4, ["cache"]),
        (3, ["cache", "primary", "archive"]),
        (2, ["primary", "archive"]),
        (1, ["archive"]),
    ]
    assert [one.generation.url.split("/")[-2] for one in found.held] == [
        "cache",
        "cache",
        "primary",
        "archive",
    ]
    assert (found.damaged, found.unreachable) == ([], {})
    assert [one.step for one in choose(found.generations)] == [4, 3, 2, 1]


def test_two_saves_under_one_folder_name_are_two_generations(roots: Roots) -> None:
    roots.commit(5, "primary", attempt="aaaaaaaa")
    roots.commit(5, "archive", attempt="bbbbbbbb")
    assert held(survey(roots.tiers())) == [(5, ["primary"]), (5, ["archive"])]


def test_a_copy_that_names_other_bytes_is_not_the_same_generation(roots: Roots) -> None:
    roots.commit(5, "primary")
    samples.commit(roots.archive, 5, attempt="0123abcd", ranks=2)
    assert len(survey(roots.tiers()).held) == 2


@pytest.mark.parametrize("tier", ["primary", "archive"])
def test_set_aside_in_one_tier_is_set_aside(roots: Roots, tier: str) -> None:
    (one, *_) = roots.commit(1, "primary", "archive", "cache")
    update_tags(getattr(roots, tier), one.folder, add={"aside": "because"})
    (found,) = survey(roots.tiers()).held
    assert found.generation.set_apart
    assert found.generation.tags == {"aside": "because"}


def test_damage_speaks_for_a_copy_and_for_all_once_no_other_is_sound(roots: Roots) -> None:
    (one, *_) = roots.commit(1, "primary", "archive")
    update_tags(roots.primary, one.folder, add={"damaged": "because"})
    (found,) = survey(roots.tiers()).held
    assert not found.generation.set_apart
    assert found.readable == ("archive",)
    update_tags(roots.archive, one.folder, add={"damaged": "too"})
    (found,) = survey(roots.tiers()).held
    assert found.generation.tags == {"damaged": "because"}
    assert found.readable == ("primary", "archive")


def test_tags_of_both_tiers_are_united(roots: Roots) -> None:
    (one, _) = roots.commit(1, "primary", "archive")
    update_tags(roots.primary, one.folder, add={"permanent": "", "suspect": "spike"})
    update_tags(roots.archive, one.folder, add={"permanent": "the paper"})
    (found,) = survey(roots.tiers()).held
    assert found.generation.tags == {"permanent": "the paper", "suspect": "spike"}


def test_damage_in_the_cache_is_damage_of_the_cache(roots: Roots) -> None:
    (one, _) = roots.commit(1, "cache", "primary")
    (only, *_) = roots.commit(2, "cache")
    for folder in (one.folder, only.folder):
        update_tags(roots.cache, folder, add={"damaged": "bit rot"})
    lonely, found = survey(roots.tiers()).held
    assert not found.generation.set_apart
    assert found.readable == ("primary",)
    assert found.generation.url == f"{roots.primary.url}/{one.folder}"
    assert lonely.generation.set_apart
    assert lonely.readable == ("cache",)


def test_old_tags_in_the_cache_do_not_bring_back_what_was_untagged(roots: Roots) -> None:
    (one, _) = roots.commit(1, "cache", "primary")
    update_tags(roots.cache, one.folder, add={"permanent": "", "aside": ""})
    (found,) = survey(roots.tiers()).held
    assert found.generation.tags == {}
    assert found.readable == ("cache", "primary")


def test_a_tier_that_does_not_answer_is_unreachable_and_not_empty(roots: Roots) -> None:
    roots.commit(1, "primary", "archive")
    for operation in ("folders", "get"):
        archive = FaultyStore(roots.archive)
        archive.fail(operation, nth=None, error=StorageError("503 slow down"))
        found = survey([Tier(name="primary", store=roots.primary), *tier_of("archive", archive)])
        assert held(found) == [(1, ["primary"])]
        assert found.unreachable == {"archive": "503 slow down"}


def stuck(store: Store, *operations: str) -> Iterator[FaultyStore]:
    """A store that holds operations until the test is over."""
    held = FaultyStore(store)
    held.block(*operations)
    yield held
    held.release()


@pytest.fixture
def stuck_archive(roots: Roots) -> Iterator[FaultyStore]:
    yield from stuck(roots.archive)


@pytest.fixture
def slow_archive(roots: Roots) -> Iterator[FaultyStore]:
    yield from stuck(roots.archive, "folders")


def any_usable(found: Survey) -> bool:
    return bool(choose(found.generations))


def test_a_tier_that_is_silent_is_not_waited_for_where_others_have_enough(
    roots: Roots, stuck_archive: FaultyStore
) -> None:
    roots.commit(1, "primary", "archive")
    tiers = [Tier(name="primary", store=roots.primary), *tier_of("archive", stuck_archive)]
    found = survey(tiers, enough=any_usable, patience_s=0.1)
    assert held(found) == [(1, ["primary"])]
    assert found.unreachable == {"archive": "it gave no sign of life for 0.1 s"}


def test_a_tier_that_is_silent_is_waited_for_where_others_have_nothing(
    roots: Roots, stuck_archive: FaultyStore
) -> None:
    roots.commit(1, "archive")
    tiers = [Tier(name="primary", store=roots.primary), *tier_of("archive", stuck_archive)]
    release = threading.Timer(0.5, stuck_archive.release)
    release.start()
    found = survey(tiers, enough=any_usable, patience_s=0.1)
    release.join()
    assert held(found) == [(1, ["archive"])]
    assert found.unreachable == {}


def test_a_tier_that_is_slow_to_list_is_waited_for(roots: Roots, slow_archive: FaultyStore) -> None:
    roots.commit(1, "primary")
    roots.commit(2, "archive")
    tiers = [Tier(name="primary", store=roots.primary), *tier_of("archive", slow_archive)]
    release = threading.Timer(0.5, slow_archive.release)
    release.start()
    assert held(survey(tiers, enough=any_usable, patience_s=0.1))[0] == (2, ["archive"])
    release.join()


def test_a_broken_manifest_in_one_tier_leaves_the_copy_in_the_other(roots: Roots) -> None:
    (one, _) = roots.commit(1, "primary", "archive")
    Path(roots.primary.url, one.folder, "manifest.json").write_text("{")
    found = survey(roots.tiers())
    assert held(found) == [(1, ["archive"])]
    ((tier, folder, reason),) = found.damaged
    assert (tier, folder) == ("primary", one.folder)
    assert "not JSON" in reason


def test_one_tier_alone_is_a_survey_too(roots: Roots) -> None:
    roots.commit(1, "primary")
    assert held(survey(tier_of("primary", roots.primary))) == [(1, ["primary"])]
    assert held(survey([])) == []


def tier_of(name: TierName, store: Store) -> list[Tier]:
    return [Tier(name=name, store=store)]
