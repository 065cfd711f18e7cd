"""A process that is killed at any request of an upload publishes the object whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.s3.proxy import Proxy
from tests.s3.rules import Kill, Point
from tests.s3.servers import Server, options_for
from torch_ckpt.storage.store import open_store

BYTES = (16 << 20) + 5
"""Two parts."""
_UPLOADER = """
import json, sys
from torch_ckpt.storage.store import open_store

def read(offset, target):
    target[:] = b"x" * len(target)
    return len(target)

open_store(sys.argv[1], json.loads(sys.argv[2])).upload("f/new", int(sys.argv[3]), read)
"""


@pytest.mark.s3
@pytest.mark.parametrize("at", ["head", "answer"])
def test_a_kill_at_any_request_of_an_upload_leaves_what_can_be_swept(
    seaweed_server: Server, prefix: str, at: Point
) -> None:
    url = f"s3://{seaweed_server.bucket}/{prefix}"
    swept = nth = 0
    for nth in range(1, 50):
        with Proxy(seaweed_server.endpoint_url) as proxy:
            options = options_for(proxy.url)
            child: list[subprocess.Popen[bytes]] = []
            proxy.on(Kill(pid=lambda child=child: child[0].pid, at=at), nth=nth)
            command = [sys.executable, "-c", _UPLOADER, url, json.dumps(options), str(BYTES)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            child.append(subprocess.Popen(command, env=environment))
            status = child[0].wait(60)
        found = seaweed_server.keys(prefix + "/")
        if found:
            assert seaweed_server.body(f"{prefix}/f/new") == b"x" * BYTES
        if status == 0:
            assert found
            break
        assert status == -signal.SIGKILL
        store = open_store(url, seaweed_server.storage_options)
        left = len(seaweed_server.uploads(prefix + "/"))
        assert store.abort_uploads("f") == left
        assert seaweed_server.uploads(prefix + "/") == []
        swept += left
        store.delete("f/new")
    assert swept >= 2
    assert nth >= 5
