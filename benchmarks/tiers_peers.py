"""The ways to bring one state into a bucket and back: this package beside the usual ones.

Each makes its client and takes its memory when it is made, so that only the transfer is measured.
Knows one server and one state of known size. Knows nothing of time, memory or targets.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

Direction = Literal["up", "down"]

PART_BYTES = 16 << 20
AT_ONCE = 8
TENSORS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a state of one size lies: `root` and `dcp` are folders in `folder`."""

    folder: Path
    label: str
    """The bucket's folder for one way and size; a name in it is that of the local file."""
    bytes: int
    endpoint_url: str
    bucket: str
    key: str
    secret: str
    region: str

    @property
    def options(self) -> dict[str, Any]:
        """For fsspec."""
        return {
            "key": self.key,
            "secret": self.secret,
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": self.region},
        }

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.label}"

    @property
    def shard(self) -> Path:
        """The one large file of the root."""
        return max((self.folder / "root").rglob("*"), key=lambda path: path.stat().st_size)

    @property
    def object(self) -> str:
        return f"{self.label}/{self.shard.relative_to(self.folder)}"


def state_of(size: int) -> dict[str, Any]:
    """Tensors of `size` bytes together, in memory that has been touched."""
    import torch

    torch.manual_seed(0)
    count = size // TENSORS // 4
    return {f"tensor-{number:02}": torch.randn(count) for number in range(TENSORS)}


class Way:
    """One way, up or down; made once for each measurement, in a process of its own."""

    title: ClassVar[str]
    needs: ClassVar[str]
    """The module without which it does not run."""

    def __init__(self, place: Place, direction: Direction) -> None:
        importlib.import_module(self.needs)
        self.place = place
        self.target = Path()
        if direction == "down":
            self.target = place.folder / "down"
            self.target.mkdir(exist_ok=True)
            self.target /= "object"

    def up(self) -> None:
        raise NotImplementedError

    def down(self) -> None:
        raise NotImplementedError


class Ours(Way):
    title, needs = "torch-ckpt", "torch_ckpt"
    more: ClassVar[dict[str, Any]] = {}
    """Storage options beside those that every way has."""

    def __init__(self, place: Place, direction: Direction) -> None:
        super().__init__(place, direction)
        options = {**place.options, **self.more}
        from torch_ckpt.generations.catalog import Catalog
        from torch_ckpt.storage.store import open_store

        url = f"{place.url}/root"
        if direction == "up":
            self._root = open_store(place.folder / "root")
            self._archive = open_store(url, options)
            (self._generation,) = Catalog(self._root).committed()
        else:
            from torch_ckpt import Checkpointer

            self._state = state_of(place.bytes)
            self._checkpointer = Checkpointer(
                url, storage_options=options, distributed=False, keep=None
            )

    def up(self) -> None:
        from torch_ckpt.generations.copy import copy_generation

        if copy_generation(self._root, self._archive, self._generation).bytes < self.place.bytes:
            raise RuntimeError("something of it was in the bucket before")

    def down(self) -> None:
        self._checkpointer.load(self._state)


class OursUnsigned(Ours):
    """As over TLS for who asks for it: the client hashes once, against the manifest."""

    title = "torch-ckpt, CRC64NVME, unsigned"
    more: ClassVar[dict[str, Any]] = {
        "s3_additional_kwargs": {"ChecksumAlgorithm": "CRC64NVME"},
        "config_kwargs": {"s3": {"payload_signing_enabled": False}},
    }


class _Obstore(Way):
    needs = "obstore"

    def __init__(self, place: Place, direction: Direction) -> None:
        super().__init__(place, direction)
        from obstore.store import S3Store

        self._store = S3Store(
            place.bucket,
            endpoint=place.endpoint_url,
            region=place.region,
            access_key_id=place.key,
            secret_access_key=place.secret,
            client_options={"allow_http": True, "timeout": "300s"},
        )
        if direction == "down":
            self._memory = np.ones(place.shard.stat().st_size, dtype=np.uint8).data

    def _put(self, source: Any) -> None:
        import obstore

        obstore.put(
            self._store,
            self.place.object,
            source,
            use_multipart=True,
            chunk_size=PART_BYTES,
            max_concurrency=AT_ONCE,
        )


class ObstoreFile(_Obstore):
    """From the file; back as a whole, by one request."""

    title = "obstore put(Path), get().bytes()"

    def up(self) -> None:
        self._put(self.place.shard)

    def down(self) -> None:
        import obstore

        data = obstore.get(self._store, self.place.object).bytes()
        if len(data) != len(self._memory):
            raise RuntimeError("too short")


class ObstoreMemory(_Obstore):
    """The file read into memory as a whole first; back in ranges, into memory that is there."""

    title = "obstore put(bytes), get_range × 8"

    def up(self) -> None:
        self._put(self.place.shard.read_bytes())

    def down(self) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(self._range, range(0, len(self._memory), PART_BYTES)):
                pass

    def _range(self, start: int) -> None:
        import obstore

        target = self._memory[start : start + PART_BYTES]
        key = self.place.object
        target[:] = memoryview(
            obstore.get_range(self._store, key, start=start, length=len(target))
        ).cast("B")


class S3fs(Way):
    title, needs = "s3fs put_file, get_file", "s3fs"

    def __init__(self, place: Place, direction: Direction) -> None:
        super().__init__(place, direction)
        from s3fs import S3FileSystem

        pool: dict[str, Any] = {"config_kwargs": {"max_pool_connections": 2 * AT_ONCE}}
        self._fs = S3FileSystem(**place.options, **pool, skip_instance_cache=True)
        self._many: dict[str, Any] = {"chunksize": PART_BYTES, "max_concurrency": AT_ONCE}
        self._path = f"{place.bucket}/{place.object}"

    def up(self) -> None:
        self._fs.put_file(str(self.place.shard), self._path, **self._many)

    def down(self) -> None:
        self._fs.get_file(self._path, str(self.target), **self._many)


class Boto3(Way):
    title, needs = "boto3 transfer (classic)", "boto3"

    def __init__(self, place: Place, direction: Direction) -> None:
        super().__init__(place, direction)
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self._client = boto3.client(
            "s3",
            endpoint_url=place.endpoint_url,
            aws_access_key_id=place.key,
            aws_secret_access_key=place.secret,
            region_name=place.region,
            config=Config(max_pool_connections=2 * AT_ONCE),
        )
        self._config = TransferConfig(
            multipart_chunksize=PART_BYTES,
            max_concurrency=AT_ONCE,
            preferred_transfer_client="classic",  # the other one ignores the endpoint
        )

    def up(self) -> None:
        place = self.place
        self._client.upload_file(str(place.shard), place.bucket, place.object, Config=self._config)

    def down(self) -> None:
        place = self.place
        self._client.download_file(
            place.bucket, place.object, str(self.target), Config=self._config
        )


class S3Torch(Way):
    title, needs = "s3torchconnector", "s3torchconnector"

    def __init__(self, place: Place, direction: Direction) -> None:
        super().__init__(place, direction)
        # It takes credentials from nowhere else.
        os.environ.update(AWS_ACCESS_KEY_ID=place.key, AWS_SECRET_ACCESS_KEY=place.secret)
        self._uri = f"s3://{place.bucket}/{place.object}"
        module = importlib.import_module("s3torchconnector")
        config = module.S3ClientConfig(force_path_style=True)
        self._checkpoint = module.S3Checkpoint(
            place.region, endpoint=place.endpoint_url, s3client_config=config
        )
        if direction == "down":
            self._memory = np.ones(place.shard.stat().st_size, dtype=np.uint8).data

    def up(self) -> None:
        with self._checkpoint.writer(self._uri) as writer, self.place.shard.open("rb") as file:
            while data := file.read(PART_BYTES):
                writer.write(data)

    def down(self) -> None:
        with self._checkpoint.reader(self._uri) as reader:
            done = 0
            while done < len(self._memory):
                if not (count := reader.readinto(self._memory[done : done + PART_BYTES])):
                    raise RuntimeError("too short")
                done += count


class Dcp(Way):
    title, needs = "DCP over fsspec (s3fs)", "s3fs"

    def __init__(self, place: Place, direction: Direction) -> None:
        super().__init__(place, direction)
        import torch.distributed.checkpoint as dcp

        self._dcp = dcp
        self._state = state_of(place.bytes)
        self._fsspec = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
        self._url = f"{place.url}/dcp"

    def up(self) -> None:
        writer = self._fsspec.FsspecWriter(self._url, **self.place.options)
        with _quiet():
            self._dcp.save(self._state, storage_writer=writer, no_dist=True)

    def down(self) -> None:
        reader = self._fsspec.FsspecReader(self._url, **self.place.options)
        with _quiet():
            self._dcp.load(self._state, storage_reader=reader, no_dist=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


WAYS: dict[str, type[Way]] = {
    "ours": Ours,
    "ours-unsigned": OursUnsigned,
    "obstore-file": ObstoreFile,
    "obstore-memory": ObstoreMemory,
    "s3fs": S3fs,
    "boto3": Boto3,
    "s3torchconnector": S3Torch,
    "dcp": Dcp,
}
RAW = ("obstore-file", "obstore-memory")
"""Of these the faster one is the measure of ours."""


def save_local(folder: Path, size: int, *, also_dcp: bool) -> None:
    """The state in `folder`, as a generation of this package, and as DCP's files if asked for."""
    from torch_ckpt import Checkpointer

    state = state_of(size)
    with Checkpointer(folder / "root", mode="sync", distributed=False) as checkpointer:
        checkpointer.save(state, 1)
    if also_dcp:
        import torch.distributed.checkpoint as dcp

        with _quiet():
            dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
