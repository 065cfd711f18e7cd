"""When a save copies moments as 8-bit codes: only where the writer is certain to let it lose them.

Codes cannot be taken back once training goes on, so whoever copies them has to know that there is a
generation without loss for the save to name. Where that is not certain, all is copied whole and
the writer decides. Knows saves and rules. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from torch_ckpt.config import Config
from torch_ckpt.duties import duties_of
from torch_ckpt.manifest.layout import step_of_folder
from torch_ckpt.pending import PendingSave
from torch_ckpt.writer.encode import Encoding
from torch_ckpt.writer.job import Job
from torch_ckpt.writer.rules import MOMENTS, Rule, rule_for

if TYPE_CHECKING:
    from torch_ckpt.staging.quantise import Coding, Quantiser

_OF_MOMENTS = {Rule(*item) for item in MOMENTS.items()}
"""What a user spells as a rule for a pattern is left to the writer."""


class Quantising:
    """The decisions of one rank."""

    def __init__(self, config: Config, world_size: int, root: str) -> None:
        """For saves under `root`; without `moments` nothing is ever copied as codes."""
        self._encoding: Encoding | None = None
        if config.moments is not None:
            self._encoding = Encoding.of(duties_of(config, world_size)["encoding"])
        self._root = root
        self._quantiser: Quantiser | None = None
        self._codecs: dict[str, str | None] = {}
        self._newest: PendingSave | None = None

    def began(self, pending: PendingSave) -> None:
        """All ranks have begun a save, which the next one comes after, whatever becomes of it."""
        self._newest = pending

    def forget(self) -> None:
        """The next save may not follow the newest, or what that builds on may be gone."""
        self._newest = None

    def is_anchored(self, step: int, apart: Collection[str]) -> bool:
        """Whether a save of a step comes right after one from which the writer will go on.

        `apart` are folders of generations that nothing builds on any more.
        """
        newest = self._newest
        if (
            self._encoding is None
            or newest is None
            or newest.state != "committed"
            or not newest.anchors_next
        ):
            return False
        return step > newest.step and newest.folder not in apart

    def coding(self, job: Job) -> Coding | None:
        """How a save may be coded whose ranks are all anchored; None where not at all.

        A generation that is kept for ever loses nothing. From a folder that a user named, which
        may get a second name by its bytes, nothing goes on.
        """
        encoding = self._encoding
        under_name = job.root != self._root or step_of_folder(job.folder) is None
        if encoding is None or under_name or encoding.alone(job):
            return None
        from torch_ckpt.staging.quantise import Coding, Quantiser  # and codecs, which cost a start

        self._quantiser = self._quantiser or Quantiser()
        return Coding(self._quantiser, partial(self._codec_of, encoding))

    def _codec_of(self, encoding: Encoding, name: str) -> str | None:
        if name not in self._codecs:
            rule = rule_for(encoding.rules, (name,), encoding.codec)
            self._codecs[name] = rule.codec if rule in _OF_MOMENTS else None
        return self._codecs[name]
