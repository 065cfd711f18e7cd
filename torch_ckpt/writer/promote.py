"""One writer's part in bringing committed generations from the primary tier to the archive.

The order is that of a save: shards, parts, and the manifest last, by rank 0, once all that it names
is there. Every step looks first at what the archive has, so one that was cut anywhere is taken up
again, by this writer or by one of a later run, and what arrived whole is not sent again. Knows
stores and documents. Knows nothing of when, or of which generations are worth it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from torch_ckpt.errors import CkptError, FormatError, IntegrityError, StorageError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.copy import copy_part, lacks
from torch_ckpt.generations.index import forget
from torch_ckpt.generations.litter import sweep
from torch_ckpt.generations.passage import Passage
from torch_ckpt.generations.shards import Shards, manifest_in, missing_document, sizes_in
from torch_ckpt.manifest.attempts import is_stale
from torch_ckpt.manifest.commit import (
    publish_manifest,
    read_manifest,
    read_part,
    write_latest,
)
from torch_ckpt.manifest.entries import BLOCK_BYTES
from torch_ckpt.manifest.layout import LATEST, NOTE_LIMIT_BYTES, attempt_of, is_begun, refusal_name
from torch_ckpt.manifest.schema import Manifest, StoredFile
from torch_ckpt.storage.store import Store
from torch_ckpt.writer.claim import claim
from torch_ckpt.writer.leftovers import REFUSAL_LIMIT_BYTES, refusal
from torch_ckpt.writer.recode import Recoder

logger = logging.getLogger(__name__)


class PromotionRefused(Exception):
    """A generation that will never be archived, and why; `damage` is for a person to know of."""

    def __init__(self, reason: str, *, damage: bool) -> None:
        super().__init__(reason)
        self.damage = damage


class Promoter:
    """Promotes one rank's shares; on rank 0 also commits them in the archive."""

    def __init__(
        self,
        primary: Store,
        archive: Store,
        *,
        rank: int,
        world_size: int,
        pace: Callable[[int], None],
        codec: str = "raw",
    ) -> None:
        """`pace` is told of bytes before they are sent; it waits, or raises to end a promotion.

        With another `codec` than raw, the archive stores what is raw in the primary tier in that.
        """
        self.primary, self.archive = primary, archive
        self._recoder = Recoder(primary, archive, codec, pace) if codec != "raw" else None
        self._collected: dict[tuple[int, str], Manifest] = {}
        """Manifests of what the archive has in its own codec."""
        self._rank, self._world_size, self._pace = rank, world_size, pace
        self._claimed: set[str] = set()
        self._littered: set[str] = set()
        """Folders that hold files of another save, which the one that is promoted replaces."""

    def claim(self, run: str) -> None:
        """Make the archive this run's own; the first run that comes keeps it.

        Raises:
            ArchiveTaken: it is another run's.
            StorageError: nobody can tell whose it is, or storage did not answer.
        """
        if run not in self._claimed:
            claim(self.archive, run, looks=self._rank == 0)
            self._claimed.add(run)

    def has(self, generation: Generation) -> bool:
        """Whether the archive has committed this very generation, and its files are there.

        Of what somebody removed since, the archive is sent a new copy while the primary has one.
        """
        try:
            committed = read_manifest(self.archive, generation.folder)
        except (FileNotFoundError, FormatError, IntegrityError):
            return False  # what is damaged there is replaced
        if (committed.step, committed.attempt) != generation.id:
            return False
        there = self._there(generation)
        if missing_document(committed.parts, there) is not None:
            return False
        shards = (
            size for name, size in there.items() if name.endswith((".safetensors", ".blocks"))
        )
        return sum(shards) >= committed.bytes

    def send(self, generation: Generation, *, lends: bool = False) -> None:
        """Send what this rank has to send of a generation, and the archive lacks.

        Ranks of another world size share out the parts among them. One that `lends` its bytes to
        others is sent as it is.

        Raises:
            PromotionRefused: the primary tier does not have it whole any more.
            StorageError: a tier did not do what it was asked.
        """
        try:
            self._send(generation, lends=lends)
        except PromotionRefused as refusal:
            self._note(generation, str(refusal))
            raise

    def _send(self, generation: Generation, *, lends: bool) -> None:
        folder = generation.folder
        with self._refusing(generation, lost=f"{self.archive.url} lost what it was sent"):
            self.archive.make_folder(folder)
            there = self._there(generation)
            self._mend(generation, there)
            for index, stored in enumerate(generation.manifest.parts):
                if index % self._world_size != self._rank:
                    continue
                if lends or not self._recoded(folder, stored, there):
                    self._copied(folder, stored, there)

    @contextlib.contextmanager
    def _refusing(self, generation: Generation, *, lost: str) -> Iterator[None]:
        """Turn what only the primary tier can be to blame for into PromotionRefused."""
        try:
            yield
        except (IntegrityError, FormatError) as error:
            raise PromotionRefused(str(error), damage=True) from error
        except FileNotFoundError as error:
            self._insist_on(generation)
            raise StorageError(f"{lost}: {error}") from error

    def builds_on(self, generation: Generation) -> frozenset[tuple[int, str]]:
        """Step and attempt of each generation in whose shards blocks of this one lie.

        Reads all parts. Raises what `send` raises.
        """
        folder, found = generation.folder, set[tuple[int, str]]()
        with self._refusing(generation, lost=f"{self.primary.url} lost a part for a moment"):
            for stored in generation.manifest.parts:
                part = read_part(self.primary, folder, stored)
                found.update((one.step, one.attempt) for one in part.borrowed)
        return frozenset(found)

    def _copied(self, folder: str, stored: StoredFile, there: Mapping[str, int]) -> None:
        """Send a part as it is."""
        began = time.monotonic()
        copied = copy_part(self.primary, self.archive, folder, stored, there=there, pace=self._pace)
        if self._recoder is not None:
            self._recoder.note_sent(copied.bytes, time.monotonic() - began)

    def _recoded(self, folder: str, stored: StoredFile, there: Mapping[str, int]) -> bool:
        """Whether a part is in the archive, in its own codec."""
        return self._recoder is not None and self._recoder.send(folder, stored, there)

    def _insist_on(self, generation: Generation) -> None:
        """Raise PromotionRefused unless the primary tier has a generation whole."""
        try:
            now = read_manifest(self.primary, generation.folder)
        except (FileNotFoundError, FormatError, IntegrityError):
            now = None
        if now is None or (now.step, now.attempt) != generation.id:
            raise PromotionRefused("it was removed before it was promoted", damage=False)
        if (missing := lacks(self.primary, generation)) is not None:
            raise PromotionRefused(missing, damage=True)

    def _note(self, generation: Generation, reason: str) -> None:
        """Tell rank 0, which waits for this rank's share, that it will not come."""
        if self._rank != 0:
            name = refusal_name(self._rank, generation.manifest.attempt)
            text = reason.encode("utf-8", "replace")[:REFUSAL_LIMIT_BYTES]
            self.archive.put(f"{generation.folder}/{name}", text)

    def is_noted(self, generation: Generation) -> bool:
        """Whether this rank's refusal is in the archive still: rank 0 removes one that is not true.

        Once rank 0 has sent its own share it looks no more, so no share is refused for ever.
        """
        name = refusal_name(self._rank, generation.manifest.attempt)
        return name in sizes_in(self.archive, generation.folder)

    def _mend(self, generation: Generation, there: Mapping[str, int]) -> None:
        """Take back what an earlier run noted and what is not so any more.

        A note is of an attempt to save, and does not tell by which run it was left: its rank takes
        it back, but perhaps only after rank 0 has given the generation up. So rank 0 looks itself.
        """
        for name in [name for name in there if name.endswith(".failed")]:
            rank = _rank_in(name)
            gone = rank >= self._world_size
            over = self._rank == 0 and (gone or self._is_sound(generation, rank))
            if rank == self._rank or over:
                self.archive.delete(f"{generation.folder}/{name}")

    def _is_sound(self, generation: Generation, rank: int) -> bool:
        """Whether the primary tier has a rank's share whole; reads all of it."""
        folder = generation.folder
        try:
            for stored in generation.manifest.parts[rank :: self._world_size]:
                part = read_part(self.primary, folder, stored)
                for number, shard in enumerate(part.files):
                    passage = Passage(self.primary, folder, part, number)
                    piece = memoryview(bytearray(min(shard.bytes, BLOCK_BYTES)))
                    for offset in range(0, shard.bytes, BLOCK_BYTES):
                        self._pace(0)  # raises where this has to end
                        passage.read(offset, piece[: shard.bytes - offset])
        except (IntegrityError, FormatError, FileNotFoundError):
            return False
        return True

    def complete(self, generation: Generation) -> bool:
        """Whether the archive has all that the manifest names; one listing tells.

        Raises:
            PromotionRefused: it never will, since another rank has refused.
        """
        manifest = generation.manifest
        listed = sizes_in(self.archive, generation.folder)
        attempts = {name: attempt_of(name) for name in listed if not is_begun(name)}
        there = {n: listed[n] for n, one in attempts.items() if one == manifest.attempt}
        if any(one not in (None, manifest.attempt) for one in attempts.values()):
            self._littered.add(generation.folder)
        refused = [name for name in there if name.endswith(".failed")]
        for name in refused:
            del there[name]
        if self._is_whole(generation, there):
            for name in refused:  # none may lie beside a manifest of its attempt
                self.archive.delete(f"{generation.folder}/{name}")
            return True
        if refused:
            rank = _rank_in(refused[0])
            said = refusal(self.archive, generation.folder, rank, manifest.attempt)
            raise PromotionRefused(f"rank {rank} does not send its share: {said}", damage=False)
        return False

    def _is_whole(self, generation: Generation, there: Mapping[str, int]) -> bool:
        manifest = generation.manifest
        if self._recoder is not None and any(name.endswith(".blocks") for name in there):
            collected = self._recoder.collect(generation.folder, manifest, there)
            if collected is not None:
                self._collected[generation.id] = collected
            return collected is not None
        if missing_document(manifest.parts, there) is not None:
            return False
        shards = sum(there.values()) - sum(one.bytes for one in manifest.parts)
        if shards <= manifest.bytes:
            return shards == manifest.bytes
        # An earlier run of another `archive_codec` has left shards that no part names any more.
        self._littered.add(generation.folder)
        return self._has_shards(generation, there)

    def _has_shards(self, generation: Generation, there: Mapping[str, int]) -> bool:
        """Whether the archive has what its parts name; reads them."""
        for stored in generation.manifest.parts:
            part = read_part(self.archive, generation.folder, stored)
            if any(there.get(file.name) != file.bytes for file in part.files):
                return False
        return True

    def commit(self, generation: Generation) -> None:
        """Publish the manifest in the archive: from now on the generation exists there.

        Raises:
            StorageError: what it builds on is not there any more: others may write there, too.
        """
        self._insist_on_bases(generation)
        manifest = self._newest_manifest(generation)
        if (own := self._collected.pop(generation.id, None)) is not None:
            manifest = own.with_tags(manifest.tags)
            self._littered.add(generation.folder)  # raw shards of an earlier run's promotion
        forget(self.archive, [generation.folder])  # another one may have had this folder
        publish_manifest(self.archive, generation.folder, manifest)
        if self._is_newest(generation):
            write_latest(self.archive, generation.folder)
        if generation.folder in self._littered:
            self._littered.discard(generation.folder)
            self._sweep(generation)

    def _sweep(self, generation: Generation) -> None:
        """Drop what others left in the folder, but for what ranks may be sending into it by now."""
        attempt = generation.manifest.attempt

        def may_come(one: str) -> bool:
            if one == attempt:
                return False
            if not is_stale(one, attempt):
                return True
            # Of another session, perhaps the present one: what is sent was committed before.
            now = manifest_in(self.primary, generation.folder)
            return now is not None and now.attempt == one

        sweep(self.archive, generation.folder, spare=may_come)

    def _insist_on_bases(self, generation: Generation) -> None:
        folder, shards = generation.folder, Shards(self.archive)
        for stored in generation.manifest.parts if generation.manifest.bases else ():
            try:
                part = read_part(self.primary, folder, stored)
            except FileNotFoundError:
                part = read_part(self.archive, folder, stored)
            lent = {one.name for one in part.borrowed}
            if (reason := shards.lacking(folder, part, lent)) is not None:
                raise StorageError(
                    f"{folder} cannot be committed in {self.archive.url}: {reason}; copy that "
                    "step there again, or go on: the next generation that stands alone is archived"
                )

    def _is_newest(self, generation: Generation) -> bool:
        """Whether `LATEST` should name it: what is promoted later may be older."""
        try:
            data = self.archive.get(LATEST, limit=NOTE_LIMIT_BYTES)
            folder = data.decode("utf-8", "surrogateescape").strip()
            latest = Catalog(self.archive).read([folder]).get(folder)
        except (CkptError, OSError):
            return True
        return latest is None or latest.set_apart or latest.step <= generation.step

    def _newest_manifest(self, generation: Generation) -> Manifest:
        """With the tags of now: a person may have tagged it meanwhile."""
        try:
            now = read_manifest(self.primary, generation.folder)
        except FileNotFoundError:
            return generation.manifest
        return now if now.attempt == generation.manifest.attempt else generation.manifest

    def _there(self, generation: Generation) -> dict[str, int]:
        """The files of a generation that the archive has, and has whole."""
        return {
            name: size
            for name, size in sizes_in(self.archive, generation.folder).items()
            if attempt_of(name) == generation.manifest.attempt and not is_begun(name)
        }

    def tidy(self, generation: Generation) -> None:
        """Abort uploads that killed writers left of a generation that is archived."""
        # Others of this folder may be under way, of what has it next.
        self._abort(generation.folder, of=f".{generation.manifest.attempt}.")

    def tidy_old(self, older_than_s: float) -> None:
        """Abort uploads that were left anywhere and are old."""
        self._abort("", older_than_s=older_than_s)

    def _abort(self, folder: str, *, older_than_s: float = 0.0, of: str = "") -> None:
        try:
            aborted = self.archive.abort_uploads(folder, older_than_s=older_than_s, of=of)
        except (CkptError, OSError) as error:
            logger.debug("uploads left under %r stay: %s", folder, error)
        else:
            if aborted:
                logger.info("aborted %d uploads that were left under %r", aborted, folder)


def _rank_in(note: str) -> int:
    return int(note.removeprefix("rank-").partition(".")[0])
