"""A checkpoint of any kind as the dictionary that Lightning expects: generations and `.ckpt` files.

`weights_only` means what it means in Lightning: None and True run no code of the file. A
generation is inert but for values that were pickled when saved; `weights_only=False` allows those.
Knows `torch_ckpt` and `torch.load`. Knows nothing of trainers.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch

from lightning_ckpt import twins
from lightning_ckpt.paths import as_url, resolved, split
from lightning_ckpt.plain_file import is_file
from torch_ckpt import PickleRefused, load_generation

MapLocation = (
    Callable[[torch.UntypedStorage, str], Any]
    | torch.device
    | str
    | Mapping[str, str | torch.device]
    | None
)

MANIFEST = "manifest.json"
KEY = "torch_ckpt"
"""What `CheckpointCallback` adds to a checkpoint for itself; Lightning never sees it."""


def is_generation(url: str) -> bool:
    """Whether a path or URL is a generation's folder, or the manifest in it."""
    return not _is_web(url) and (
        is_file(f"{url}/{MANIFEST}") or (split(url)[1] == MANIFEST and is_file(url))
    )


def read_checkpoint(
    path: str | PathLike[str],
    *,
    map_location: MapLocation = None,
    weights_only: bool | None = None,
    allow_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything in the checkpoint at `path`, a generation's folder or an ordinary file.

    Raises:
        GenerationNotFound: there is neither.
        IntegrityError: a generation is damaged; file and tensor are named.
        PickleRefused: it holds pickled values, and `weights_only` is not False.
    """
    url = resolved(as_url(path))
    if split(url)[1] != MANIFEST and (_is_web(url) or is_file(url)):
        return _read_file(url, map_location, weights_only)
    root, folder = _place_of(url)
    state = generation_state(
        root,
        folder,
        allow_pickle=allow_pickle_for(weights_only, allow_pickle),
        storage_options=storage_options,
    )
    state.pop(KEY, None)
    return relocated(state, map_location)


def read_into(
    url: str,
    into: Any,
    *,
    weights_only: bool | None,
    allow_pickle: bool,
    storage_options: Mapping[str, Any] | None,
) -> None:
    """Fill a structure in place from the generation at `url`, its folder or the manifest in it.

    Raises:
        IntegrityError: the generation is damaged; file and tensor are named.
        PickleRefused: it holds pickled values, and `weights_only` is not False.
        StateMismatch: tensors do not fit.
    """
    root, folder = _place_of(url)
    with explained():
        load_generation(
            root,
            folder=folder,
            into=into,
            allow_pickle=allow_pickle_for(weights_only, allow_pickle),
            storage_options=storage_options,
        )


def open_checkpoint(path: str | PathLike[str], **options: Any) -> io.BytesIO:
    """A checkpoint as a file object, for what accepts only `torch.load`-able files.

    For example `MyModule.load_from_checkpoint(open_checkpoint(path))`. Takes the options of
    `read_checkpoint`.
    """
    file = io.BytesIO()
    torch.save(read_checkpoint(path, **options), file)
    file.seek(0)
    return file


def generation_state(
    root: str,
    folder: str,
    *,
    allow_pickle: bool,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole state of one generation, every block verified, on the host."""
    with explained():
        return load_generation(
            root, folder=folder, allow_pickle=allow_pickle, storage_options=storage_options
        )


@contextmanager
def explained() -> Iterator[None]:
    """Say in Lightning's words what allows pickled values."""
    try:
        yield
    except PickleRefused as error:
        move = "`allow_pickle=True` of the callback or the plugin"
        move = f"`fit(..., weights_only=False)`; before 2.6, which has no such argument, {move}"
        error.args = (f"{error}. In Lightning that is {move}",)
        raise


def allow_pickle_for(weights_only: bool | None, default: bool) -> bool:
    """Whether pickled values may be read: what was asked for, or else the adapter's own option."""
    return default if weights_only is None else not weights_only


def relocated(state: Any, map_location: MapLocation) -> Any:
    """The state with every tensor where `map_location` puts what is on the host."""
    if map_location is None:
        return state
    place = _placer(map_location)
    moved: dict[int, torch.Tensor] = {}  # a tensor that occurs twice stays one tensor
    return _walk(state, place, moved)


def _walk(
    value: Any, place: Callable[[torch.Tensor], torch.Tensor], moved: dict[int, torch.Tensor]
) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in moved:
            moved[id(value)] = place(value)
        return moved[id(value)]
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _walk(item, place, moved)  # in place: the type and its order stay
    elif isinstance(value, list):
        value[:] = [_walk(item, place, moved) for item in value]
    elif type(value) is tuple:
        return tuple(_walk(item, place, moved) for item in value)
    return value


def _placer(map_location: MapLocation) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu", "cpu")
    if isinstance(map_location, (str, torch.device)):
        device = torch.device(map_location)
        return lambda tensor: tensor.to(device)
    if not callable(map_location):
        raise TypeError(
            f"map_location must be a device, a name of one, a mapping or a function, "
            f"got {map_location!r}"
        )
    chosen: Callable[[torch.UntypedStorage, str], Any] = map_location

    def place(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found = chosen(storage, "cpu")
        return tensor if found is None or found is storage else tensor.to(found.device)

    return place


def _read_file(url: str, map_location: MapLocation, weights_only: bool | None) -> dict[str, Any]:
    options = {} if weights_only is None else {"weights_only": weights_only}
    return twins.torch_checkpoint_io().load_checkpoint(url, map_location=map_location, **options)


def _place_of(url: str) -> tuple[str, str]:
    """The root and the folder of a generation, given by its folder or the manifest in it."""
    root, folder = split(url)
    return split(root) if folder == MANIFEST else (root, folder)


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://"))
