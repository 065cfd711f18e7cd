"""The object stores of the tests answer, listen on the loopback address only, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import psutil
import pytest

from tests.s3.servers import Server, weed_program

_HOLDER = """
import signal, sys, time
from tests.s3 import servers
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
with getattr(servers, sys.argv[1])() as server:
    print(server.pid, server.endpoint_url, flush=True)
    time.sleep(60)
"""


def _stores(server: Server, prefix: str) -> None:
    fs = fsspec.filesystem("s3", skip_instance_cache=True, **server.storage_options)
    fs.pipe_file(f"{server.bucket}/{prefix}/a", b"1")
    assert server.keys(prefix) == [f"{prefix}/a"]
    assert server.body(f"{prefix}/a") == b"1"
    client = server.client()
    upload = client.create_multipart_upload(Bucket=server.bucket, Key=f"{prefix}/b")["UploadId"]
    assert server.uploads(prefix) == [f"{prefix}/b"]
    client.abort_multipart_upload(Bucket=server.bucket, Key=f"{prefix}/b", UploadId=upload)
    assert server.uploads(prefix) == []


def _leaves_nothing(kind: str, temp: Path, *, end: signal.Signals) -> None:
    held = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, kind],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temp), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert held.stdout is not None
    pid, _url = held.stdout.readline().split()
    sockets = {path.name for path in Path("/tmp").glob("seaweedfs-*") if _is_of(path, int(pid))}
    assert list(temp.iterdir())
    held.send_signal(end)
    held.wait(20)
    held.stdout.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (psutil.pid_exists(int(pid)) or list(temp.iterdir())):
        time.sleep(0.05)
    assert not psutil.pid_exists(int(pid))
    assert not list(temp.iterdir())
    assert not [name for name in sockets if Path("/tmp", name).exists()]


def _is_of(path: Path, pid: int) -> bool:
    ports = {s.laddr.port for s in psutil.Process(pid).net_connections(kind="tcp")}
    return int(path.stem.rpartition("-")[2]) in ports


def test_moto_stores(moto_server: Server, prefix: str) -> None:
    _stores(moto_server, prefix)


def test_moto_ends_with_a_killed_test_process(tmp_path: Path) -> None:
    _leaves_nothing("moto", tmp_path, end=signal.SIGKILL)


@pytest.mark.s3
def test_seaweed_stores(seaweed_server: Server, prefix: str) -> None:
    _stores(seaweed_server, prefix)


@pytest.mark.s3
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.skipif(weed_program() is None, reason="no SeaweedFS for this platform")
def test_seaweed_ends_with_an_ended_test_process(tmp_path: Path, end: signal.Signals) -> None:
    _leaves_nothing("seaweed", tmp_path, end=end)
