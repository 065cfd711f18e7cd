"""Every failure this package reports, each one picklable so that all ranks see the real one.

Knows nothing but text and facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def _rebuild(
    kind: type[Exception], args: tuple[object, ...], facts: dict[str, object]
) -> Exception:
    error = kind.__new__(kind, *args)
    error.args = args[:2] if isinstance(error, OSError) else args  # as OSError itself keeps them
    error.__dict__.update(facts)
    return error


class CkptError(Exception):
    """Any failure this package reports."""

    def __reduce__(self) -> tuple[Callable[..., Exception], tuple[object, ...]]:
        args = self.args
        if isinstance(self, OSError) and self.filename is not None:
            args = (*args, self.filename)  # OSError keeps it outside `args` and `__dict__`
        return _rebuild, (type(self), args, self.__dict__)  # without calling __init__


class ConfigError(CkptError, ValueError):
    """An option or argument that cannot be used, refused at construction."""


class UnsupportedState(CkptError, TypeError):
    """The state holds something that cannot be saved; nothing was written."""

    def __init__(self, *, key: str, what: str, remedy: str) -> None:
        self.key, self.what = key, what
        super().__init__(f"state[{key!r}] is {what}, which cannot be saved; {remedy}")


class SaveFailed(CkptError, RuntimeError):
    """A save did not commit; the previous generation stands."""

    def __init__(self, *, step: int, reason: str) -> None:
        self.step, self.reason = step, reason
        super().__init__(
            f"the save of step {step} failed: {reason}; the previous generation stands"
        )


class WriterDied(SaveFailed):
    """The side process that was writing this save ended or stopped answering."""


class SnapshotTorn(SaveFailed):
    """A tensor changed while it was being copied, so the snapshot was discarded."""

    def __init__(self, *, step: int, tensors: Iterable[str]) -> None:
        self.tensors = sorted(tensors)
        names = ", ".join(repr(name) for name in self.tensors[:5])
        more = f" and {len(self.tensors) - 5} more" if len(self.tensors) > 5 else ""
        super().__init__(
            step=step,
            reason=f"{names}{more} changed before the fence; call `fence()` before anything "
            'changes the state, or save with block="staged"',
        )


class ArchiveTaken(CkptError, RuntimeError):
    """The archive belongs to another run, so nothing is promoted there."""

    def __init__(self, *, archive: str, owner: str, run: str) -> None:
        self.archive, self.owner, self.run = archive, owner, run
        super().__init__(
            f"{archive} is the archive of run {owner}, so run {run} sends nothing there; give "
            "this run a prefix of its own"
        )


class NotArchived(CkptError, RuntimeError):
    """A generation is committed, and will not come into the archive."""

    def __init__(self, *, step: int, reason: str) -> None:
        self.step, self.reason = step, reason
        super().__init__(f"step {step} is committed and not in the archive: {reason}")


class SaveSkipped(SaveFailed):
    """Both slabs were busy and `on_busy="skip"` was asked for."""


class DisagreementError(CkptError, RuntimeError):
    """Ranks came to one save or load with different steps, states or runs."""


class IntegrityError(CkptError, ValueError):
    """Stored bytes do not match their recorded digest or length."""

    def __init__(self, *, file: str, offset: int, reason: str, tensors: Iterable[str] = ()) -> None:
        self.file, self.offset, self.reason = file, offset, reason
        self.tensors = list(tensors)
        held = f" (holds {', '.join(self.tensors[:3])}" if self.tensors else ""
        held += f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        held += ")" if self.tensors else ""
        super().__init__(
            f"{file} at byte {offset}{held}: {reason}; run `torch-ckpt verify` for the extent, "
            "or resume from an earlier step"
        )


class FormatError(CkptError, ValueError):
    """A document is not one that this version can or may read."""

    def __init__(self, *, file: str, reason: str) -> None:
        self.file, self.reason = file, reason
        super().__init__(f"{file}: {reason}")


class GenerationNotFound(CkptError, FileNotFoundError):
    """There is no committed generation where one was asked for."""


class NothingUsable(CkptError, RuntimeError):
    """Generations exist, but none of them can be used; starting afresh is the user's decision."""

    def __init__(self, *, root: str, reasons: Iterable[str]) -> None:
        self.root, self.reasons = root, list(reasons)
        super().__init__(
            f"{root} holds generations but none is usable: {'; '.join(self.reasons)}. "
            "Repair or remove them, or point to another folder to start afresh"
        )


class StateMismatch(CkptError, ValueError):
    """The generation does not fit the structure it should be loaded into."""

    def __init__(
        self,
        *,
        where: str,
        missing: Iterable[str] = (),
        surplus: Iterable[str] = (),
        misshaped: Iterable[str] = (),
    ) -> None:
        self.where = where
        self.missing, self.surplus = sorted(missing), sorted(surplus)
        self.misshaped = sorted(misshaped)
        parts = [
            f"{label}: {', '.join(names)}"
            for label, names in (
                ("missing from the generation", self.missing),
                ("not in the given state", self.surplus),
                ("of another shape or dtype", self.misshaped),
            )
            if names
        ]
        super().__init__(
            f"{where} does not fit the given state: {'; '.join(parts)}. "
            "Pass strict=False to load what fits"
        )


class PickleRefused(CkptError, ValueError):
    """A value was pickled when it was saved and unpickling was not allowed."""

    def __init__(self, *, where: str, values: Iterable[str]) -> None:
        self.where, self.values = where, list(values)
        super().__init__(
            f"{where} holds pickled values ({'; '.join(self.values)}); unpickling can run code, "
            "so pass allow_pickle=True only if you trust who wrote it"
        )


class ClassNotLoaded(CkptError, LookupError):
    """A saved value is of a class that this process has not imported; nothing is damaged."""

    def __init__(self, *, key: str, name: str) -> None:
        self.key, self.name = key, name
        super().__init__(
            f"{key} is of the class {name!r}, which is not loaded; import it before loading"
        )


class StorageError(CkptError, OSError):
    """Storage refused, lost or could not finish a request."""


class ServerBusy(StorageError):
    """An object store asks to be left alone for a while; what was asked of it was not done."""

    def __init__(self, refusal: str, *, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{refusal}; it asks to be left alone for {retry_after_s:.0f} s")


class UnexpectedFile(StorageError):
    """What stands under a stored name is not a file that a save wrote."""


class RunBusy(CkptError, RuntimeError):
    """Another process is writing this run, or its writer did not finish in time."""
