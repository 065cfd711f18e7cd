"""One snapshot: copying live tensors into a slab, part of it now and the rest behind training.

Knows tensors, streams and a slab. Knows nothing of names, storage or when training steps.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from torch_ckpt.manifest.blocks import Placed
from torch_ckpt.staging.slab import Slab

_COMPARE_BYTES = 64 << 20
_WIDEST_BYTES = 16
_BYTES_AS_COPIED = {torch.uint8, torch.int8, torch.bool}


@dataclass(eq=False, slots=True)  # frozen would cost a microsecond for each tensor of a state
class Source:
    """A live tensor and where its copy goes."""

    name: str
    live: torch.Tensor
    place: Placed


class Coding(Protocol):
    """Takes the place of copying some of the lazy sources whole."""

    def wants(self, source: Source) -> bool:
        """Whether `code` is worth a call."""
        ...

    def code(self, source: Source, room: torch.Tensor) -> bool:
        """Put something shorter into the room of a source; False: it is to be copied whole."""
        ...

    def escaped(self) -> Iterable[Source]:
        """Once all has arrived: sources that have to be copied whole after all."""
        ...


class Views:
    """Tensors in a slab, made when they are asked for."""

    def __init__(self, slab: Slab) -> None:
        self._bytes = slab.tensor
        self._typed: dict[str, torch.Tensor] = {}
        self.address = self._bytes.data_ptr()

    def of(self, place: Placed) -> torch.Tensor:
        """Where a piece lies; every piece is aligned to its elements."""
        piece = place.piece
        typed = self._typed.get(piece.dtype)
        if typed is None:
            usable = self._bytes.numel() // _WIDEST_BYTES * _WIDEST_BYTES
            typed = self._bytes[:usable].view(getattr(torch, piece.dtype))
            self._typed[piece.dtype] = typed
        strides, step = [], 1
        for length in reversed(piece.shape):
            strides.append(step)
            step *= length
        start = place.start // typed.element_size()
        return typed.as_strided(piece.shape, strides[::-1], start)

    def room_of(self, place: Placed) -> torch.Tensor:
        """The bytes of a piece."""
        return self._bytes[place.start : place.start + place.piece.bytes]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not count."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def _versions(sources: Sequence[Source]) -> list[int]:
    try:
        return [source.live._version for source in sources]
    except RuntimeError:  # an inference tensor is among them
        return [version_of(source.live) for source in sources]


class Snapshot:
    """Copies sources into a slab; what is not eager is copied by a thread until `complete`."""

    def __init__(
        self,
        slab: Slab,
        eager: Sequence[Source],
        lazy: Sequence[Source],
        coding: Coding | None = None,
    ) -> None:
        self._eager, self._lazy, self._coding = list(eager), list(lazy), coding
        self._views = Views(slab)
        self._versions = _versions(self._lazy)
        self._failure: BaseException | None = None
        self._abandoned = False
        self._idle = threading.Event()
        self._idle.set()
        devices = {source.live.device for source in (*eager, *lazy) if source.live.is_cuda}
        self._copier = _CudaCopier(devices) if devices else None

    def begin(self) -> None:
        """Copy the eager sources."""
        for source in self._eager:
            if self._copier is not None and source.live.is_cuda:
                self._copier.copy(self._views.of(source.place), source.live)
            else:
                copy_exactly(self._views.of(source.place), source.live)
        if self._copier is not None:
            self._copier.fence_eager()

    def start(self, then: object = None) -> None:
        """Copy the lazy sources on a thread; call `then` on it once they are copied."""
        thread = threading.Thread(
            target=self._copy_lazy, args=(then,), name="ckpt-copy", daemon=True
        )
        self._idle.clear()
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left
            self._idle.set()
            raise

    def _copy_lazy(self, then: object) -> None:
        try:
            self._copy_each(self._lazy, self._coding)
            if self._coding is not None and not self._abandoned:
                self._copy_each(list(self._coding.escaped()))
            if self._abandoned:
                return
            if callable(then) and not self.moved():  # a torn copy must not outlive the trainer
                then()
        except BaseException as error:
            self._failure = error
        finally:
            self._idle.set()

    def _copy_each(self, sources: Iterable[Source], coding: Coding | None = None) -> None:
        """Copy lazy sources, or code them where `coding` can; they have arrived on return."""
        for source in sources:
            if self._abandoned:
                return
            if coding is not None and coding.wants(source) and self._code(source, coding):
                continue
            if self._copier is not None and source.live.is_cuda:
                self._copier.copy(self._views.of(source.place), source.live)
            else:
                self._copy_beside_training(source)
        if self._copier is not None:
            self._copier.synchronize()

    def _code(self, source: Source, coding: Coding) -> bool:
        copier = self._copier if source.live.is_cuda else None
        with nullcontext() if copier is None else copier.on(source.live):
            return coding.code(source, self._views.room_of(source.place))

    def _copy_beside_training(self, source: Source) -> None:
        """One thread and no intra-op pool, so that training keeps its cores."""
        live, place = source.live, source.place
        plain = live.is_contiguous() and not live.is_conj() and not live.is_neg()
        if plain and live.device.type == "cpu":
            ctypes.memmove(self._views.address + place.start, live.data_ptr(), place.piece.bytes)
        else:
            copy_exactly(self._views.of(place), live)

    def abandon(self) -> None:
        """Stop copying; on return nothing writes into the slab any more."""
        self._abandoned = True
        self._idle.wait()
        if self._copier is not None:
            self._copier.synchronize()

    def complete(self) -> list[str]:
        """Wait until everything is copied; the names of sources that changed meanwhile.

        Raises:
            RuntimeError: copying itself failed; the cause says how.
        """
        self._idle.wait()
        if self._copier is not None:
            self._copier.synchronize()
        if self._failure is not None:
            raise RuntimeError("copying the state into its slab failed") from self._failure
        return self.moved()

    def moved(self) -> list[str]:
        """Lazy sources whose version differs from the one at save time."""
        now = _versions(self._lazy)
        if now == self._versions:
            return []
        together = zip(self._lazy, self._versions, now, strict=True)
        changed = [source for source, then, version in together if version != then]
        # What has no elements has no address by which to tell who owns it, and nothing to tear.
        return [source.name for source in changed if source.live.numel()]


def copy_exactly(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy without converting anything: also NaN payloads and dtypes that torch cannot compute."""
    if source.element_size() == 1 and source.dtype not in _BYTES_AS_COPIED:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)


def holds(copy: torch.Tensor, live: torch.Tensor) -> bool:
    """Whether a copy still has the very bytes of the live tensor."""
    if live.device.type == "cpu" and live.is_contiguous() and not live.is_conj() | live.is_neg():
        return _equal(copy, live)
    if live.dim() == 0:
        copy, live = copy.reshape(1), live.reshape(1)
    rows = max(1, _COMPARE_BYTES // max(1, copy[:1].numel() * copy.element_size()))
    for copied, moved in zip(copy.split(rows), live.split(rows), strict=True):
        landed = torch.empty_like(copied)
        copy_exactly(landed, moved)
        if not _equal(copied, landed):
            return False
    return True


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    size = left.numel() * left.element_size()
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return not size or compare(left.data_ptr(), right.data_ptr(), size) == 0


class _CudaCopier:
    """Device-to-host copies on a side stream per device, ordered after what training queued.

    To be made on the thread that trains: which stream is current is a thread's own affair.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        for device, stream in self._streams.items():
            # Without this the copy could run before the optimizer step that is still queued.
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, copy: torch.Tensor, live: torch.Tensor) -> None:
        stream = self._streams[live.device]
        with torch.cuda.stream(stream):
            copy.copy_(live, non_blocking=True)
            live.record_stream(stream)

    @contextmanager
    def on(self, live: torch.Tensor) -> Iterator[None]:
        """Compute something from a tensor where and when it would be copied."""
        stream = self._streams[live.device]
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                live.record_stream(stream)

    def fence_eager(self) -> None:
        """Hold back the device, not the host, until what must be copied now is copied."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def synchronize(self) -> None:
        """Hold back the host until every copy has arrived."""
        for stream in self._streams.values():
            stream.synchronize()
