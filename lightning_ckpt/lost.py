"""A checkpoint whose folder is gone, from where the plugin's tiers have it: cache, then archive.

Knows paths, tiers and the engine. Knows nothing of trainers, or of why a folder is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning_ckpt.paths import split
from lightning_ckpt.reading import MANIFEST, MapLocation, read_checkpoint
from torch_ckpt import FormatError, GenerationNotFound, IntegrityError

logger = logging.getLogger(__name__)


def read_lost(
    url: str,
    tiers: Mapping[str, Any],
    missing: GenerationNotFound,
    *,
    alone: bool,
    map_location: MapLocation,
    weights_only: bool | None,
    allow_pickle: bool,
) -> dict[str, Any]:
    """The checkpoint of the name that `url` has, from the archive of `tiers`; else raise `missing`.

    Only a process that is `alone` looks into the cache, which is nearer and may be ahead: the
    ranks of several nodes would not all find the same there.

    Raises:
        GenerationNotFound: no tier has one of this name; the message says where was looked.
        FormatError, IntegrityError, PickleRefused: as `read_checkpoint`.
    """
    root, name = split(url)
    if name == MANIFEST:
        name = split(root)[1]
    places: list[tuple[str, Mapping[str, Any] | None]] = []
    if alone and tiers.get("cache"):
        places.append((tiers["cache"], None))
    if tiers.get("archive"):
        places.append((tiers["archive"], tiers.get("archive_options")))
    for number, (place, storage_options) in enumerate(places, 1):
        found = f"{place.rstrip('/')}/{name}"
        try:
            checkpoint = read_checkpoint(
                found,
                map_location=map_location,
                weights_only=weights_only,
                allow_pickle=allow_pickle,
                storage_options=storage_options,
            )
        except GenerationNotFound:
            continue
        except (FormatError, IntegrityError) as error:
            if number == len(places):
                raise
            logger.warning("%s", error)
            continue
        logger.warning("%s is not there; %s is read instead", url, found)
        return checkpoint
    if places:
        looked = " and ".join(place for place, _ in places)
        raise GenerationNotFound(f"{missing}; {name!r} is not in {looked} either") from missing
    raise missing
