"""A process is killed at every call with which it writes a file: no name stands for wrong bytes.

Whoever lists a folder afterwards goes by names and sizes, and must not be led astray.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torch_ckpt.manifest.layout import attempt_of, is_ours
from torch_ckpt.storage.store import open_store

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

NAME = "rank-00000.0badcafe.safetensors"
DATA = bytes(range(1, 251)) * 100
"""No zeros in it, six pages and a bit."""

CREATE = """
sink = store.create(NAME, len(data))
for start in (16384, 8192, 0):
    sink.write_at(start, memoryview(data)[start:start + 8192 if start < 16384 else len(data)])
sink.finish()
"""
GROW = """
sink = store.create(NAME, 10 * len(data), exact=False)
for start in range(0, len(data), 8192):
    sink.write_at(start, memoryview(data)[start:start + 8192])
sink.finish()
"""
UPLOAD = """
def read(offset, target):
    target[:] = data[offset:offset + len(target)]
    return len(target)
store.upload(NAME, len(data), read)
"""
LINK = """
import errno
def unsupported(*args, **options):
    raise OSError(errno.EOPNOTSUPP, "no links here")
os.link = unsupported
store.link("h/source", NAME)
"""


def killed_at(tmp_path: Path, body: str, call: str, nth: int) -> Path | None:
    """The folder that a killed process left; None where there was no such call any more."""
    root = tmp_path / f"{call}-{nth}"
    store = open_store(os.fspath(root))
    store.make_folder("g")
    store.make_folder("h")
    (root / "h" / "source").write_bytes(DATA)
    code = (
        "import os, sys; from torch_ckpt.storage.store import open_store\n"
        f"store, data, NAME = open_store(sys.argv[1]), {DATA!r}, 'g/{NAME}'\n{body}"
    )
    log = tmp_path / "log"
    command = ["strace", "-f", "-qq", "-o", os.fspath(log), "-e", f"trace={call}"]
    command += ["-e", f"inject={call}:signal=KILL:when={nth}", sys.executable, "-c", code]
    done = subprocess.run([*command, os.fspath(root)], capture_output=True, text=True)
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip("strace may not attach here")
    if done.returncode == 0:
        assert (root / "g" / NAME).read_bytes() == DATA
        return None
    assert done.returncode in (-9, 137), done.stderr
    return root / "g"


@pytest.mark.parametrize(
    ("body", "least"),
    [(CREATE, 8), (GROW, 8), (UPLOAD, 5), (LINK, 4)],
    ids=["create", "grow", "upload", "copy-in-place-of-a-link"],
)
def test_a_file_has_its_name_only_once_all_of_its_bytes_are_durable(
    tmp_path: Path, body: str, least: int
) -> None:
    killed = 0
    for call in ("ftruncate", "pwrite64", "copy_file_range", "fsync", "rename"):
        nth = 1
        while (left := killed_at(tmp_path, body, call, nth)) is not None:
            nth, killed = nth + 1, killed + 1
            for file in left.iterdir():
                assert is_ours(file.name), file.name
                assert attempt_of(file.name) == "0badcafe"  # so it is swept with its attempt
                assert file.name != NAME or file.read_bytes() == DATA, f"{call} {nth - 1}"
    assert killed >= least
