"""The header of a raw shard: a shard that other tools read must say what its part says.

Loading by a part never needs these bytes; whoever opens the shard as a safetensors file does, so
damage in them is damage of the generation. Knows shards and parts. Knows nothing of blocks' bytes.
"""

from __future__ import annotations

import json

from torch_ckpt.errors import FormatError
from torch_ckpt.generations.read import BlockReader
from torch_ckpt.manifest.blocks import PAGE_BYTES, Piece, Placed, safetensors_header
from torch_ckpt.manifest.digest import sha256_hex
from torch_ckpt.manifest.schema import Part, StoredFile
from torch_ckpt.storage.store import Store

HEADER_LIMIT_BYTES = 512 << 20
"""A safetensors header is O(tensors); a longer one is damage."""


def check_header(store: Store, folder: str, reader: BlockReader, number: int) -> int:
    """Check the header of one file of a part, and return where its data begins.

    Raises:
        FormatError: it does not describe the part's tensors.
        FileNotFoundError: the file is not there.
    """
    return len(read_header(store, folder, reader, number))


def checked_header(store: Store, folder: str, reader: BlockReader, number: int) -> tuple[int, str]:
    """What `check_header` does; where the data begins, and the SHA-256 of all bytes before it.

    Raises what `check_header` raises.
    """
    header = read_header(store, folder, reader, number)
    return len(header), sha256_hex(header)


def read_header(store: Store, folder: str, reader: BlockReader, number: int) -> bytes:
    """All bytes of a file before its data, checked.

    Raises:
        FormatError: it does not describe the part's tensors.
        FileNotFoundError: the file is not there.
    """
    try:
        return _checked(store, folder, reader, number)
    except FormatError:
        if store.capabilities.files:
            raise
        return _checked(store, folder, reader, number)  # a bit may have flipped on a long way


def _checked(store: Store, folder: str, reader: BlockReader, number: int) -> bytes:
    file = reader.part.files[number]
    name = f"{store.url}/{folder}/{file.name}"
    prefix = _bytes_of(store, folder, file, 0, 8)
    length = int.from_bytes(prefix, "little")
    data_start = 8 + length
    if length > HEADER_LIMIT_BYTES or data_start > file.bytes or data_start % PAGE_BYTES:
        raise FormatError(file=name, reason=f"says its header has {length} bytes")
    text = _bytes_of(store, folder, file, 8, length)
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(file=name, reason=f"has a broken header: {error}") from error
    expected = json.loads(safetensors_header(_placed(reader.part))[8:].decode("utf-8"))
    moved = any(
        block.file == number and block.codec == "raw" and block.offset != data_start + start
        for block, start in zip(reader.part.blocks, reader.starts, strict=False)
    )
    if moved or header != expected:
        raise FormatError(file=name, reason="has a header that does not describe its tensors")
    return prefix + text


def is_raw(reader: BlockReader, number: int) -> bool:
    """Whether a file of a part is a plain safetensors file."""
    return reader.part.files[number].name.endswith(".safetensors")


def _placed(part: Part) -> list[Placed]:
    return [
        Placed(
            Piece(tensor.name, tensor.dtype, chunk.shape, chunk.offsets, tensor.shape), chunk.start
        )
        for tensor in part.tensors
        for chunk in tensor.chunks
    ]


def _bytes_of(store: Store, folder: str, file: StoredFile, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    if store.read_into(f"{folder}/{file.name}", offset, memoryview(buffer)) != length:
        name = f"{store.url}/{folder}/{file.name}"
        raise FormatError(file=name, reason="ends inside its header")
    return bytes(buffer)
