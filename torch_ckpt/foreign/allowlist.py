"""The pickle in which torch.distributed.checkpoint keeps its metadata, read without running it.

Each class that such a file may name is replaced by an inert stand-in, so nothing of torch, of the
standard library or of the user is looked up, called or changed. Knows the names that DCP has used
since torch 2.1. Knows nothing of what the values mean.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch_ckpt.errors import FormatError
from torch_ckpt.manifest.dtypes import DTYPES

_PROPERTIES = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")


class Refused(pickle.UnpicklingError):
    """The file names something that metadata has no need of."""


class Record:
    """An object of one of DCP's classes: its attributes, and nothing that does anything."""

    def __new__(cls, *_arguments: object) -> Record:
        record = object.__new__(cls)
        record.fields = {}
        return record

    fields: dict[object, Any]

    def __setstate__(self, state: object) -> None:
        """Keep what a class would make its attributes."""
        if isinstance(state, dict):
            self.fields = dict(state)
        elif isinstance(state, tuple):  # as TensorProperties does
            self.fields = dict(zip(_PROPERTIES, state, strict=False))
        else:
            raise Refused("an object with attributes of another kind")


class Metadata(Record):
    """The document itself."""


class TensorMetadata(Record):
    """A tensor: its dtype, shape and chunks."""


class TensorProperties(Record):
    """The dtype of a tensor, and properties that DCP has deprecated."""


class ChunkMetadata(Record):
    """Where in its tensor a chunk lies."""


class BytesMetadata(Record):
    """A value that is no tensor."""


class Index(Record):
    """Which chunk of what name an item is."""


class StorageInfo(Record):
    """Where in which file an item is."""


class _Other(Record):
    """What is of no interest: paths, layouts, memory formats."""


class _MemoryFormat(_Other):
    """Members are made by a call, or in some versions of Python by `getattr`."""


class _Member(_Other):
    """`getattr` itself, for members of that one enumeration."""

    def __new__(cls, *arguments: object) -> Record:
        if len(arguments) != 2 or arguments[0] is not _MemoryFormat:
            raise Refused("builtins.getattr")
        return object.__new__(_Other)


class Size(tuple[Any, ...]):
    """The lengths or offsets in `torch.Size`."""

    __slots__ = ()

    def __new__(cls, lengths: Iterable[Any] = ()) -> Size:
        return tuple.__new__(cls, lengths)

    def __setstate__(self, state: object) -> None:
        raise Refused("a torch.Size with attributes")


_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.2
_STAND_INS: dict[str, object] = {
    f"{_CHECKPOINT}.metadata.Metadata": Metadata,
    f"{_CHECKPOINT}.metadata.TensorStorageMetadata": TensorMetadata,
    f"{_CHECKPOINT}.metadata.TensorProperties": TensorProperties,
    f"{_CHECKPOINT}.metadata.ChunkStorageMetadata": ChunkMetadata,
    f"{_CHECKPOINT}.metadata.BytesStorageMetadata": BytesMetadata,
    f"{_CHECKPOINT}.metadata.MetadataIndex": Index,
    f"{_CHECKPOINT}.metadata.StorageMeta": _Other,
    f"{_CHECKPOINT}.metadata._MEM_FORMAT_ENCODING": _MemoryFormat,
    f"{_CHECKPOINT}.filesystem._StorageInfo": StorageInfo,
    f"{_SHARDED}.TensorProperties": TensorProperties,
    f"{_SHARDED}.MEM_FORMAT_ENCODING": _MemoryFormat,
    "torch.Size": Size,
    "torch.device": _Other,
    "torch.serialization._get_layout": _Other,
    "builtins.getattr": _Member,
    "collections.OrderedDict": OrderedDict,
    **{f"torch.{name}": name for name in DTYPES},
    **{
        # Not bytes or bytearray: from one number they make as many bytes as it says.
        f"builtins.{kind.__name__}": kind
        for kind in (bool, complex, dict, float, frozenset, int, list, set, str, tuple)
    },
    **{
        f"{module}.{name}": _Other
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
"""Every name that may occur, and what stands for it; a dtype is its name."""


class _Unpickler(pickle.Unpickler):
    """Looks up stand-ins and nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in _STAND_INS:
            raise Refused(name)
        return _STAND_INS[name]


def read_pickle(path: Path) -> Metadata:
    """The document in a `.metadata` file, made of stand-ins.

    Raises:
        FormatError: it names a class that metadata has no need of, is cut short, or is no pickle.
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            document = _Unpickler(file).load()
    except Refused as error:
        raise FormatError(
            file=str(path),
            reason=f"names {error}, which no metadata of torch.distributed.checkpoint needs; "
            "nothing of it was run",
        ) from error
    except OSError:
        raise
    except Exception as error:  # bytes that are no pickle make it raise almost anything
        raise FormatError(
            file=str(path), reason=f"is cut short, or no metadata ({type(error).__name__}: {error})"
        ) from error
    if type(document) is not Metadata:
        raise FormatError(
            file=str(path), reason=f"holds a {type(document).__name__} where metadata should be"
        )
    return document
