"""One transfer of tiers.py in a process of its own; prints what it took as one line of JSON.

Knows time, CPU and memory of this process and the CPU of the server. Knows nothing of the ways.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiers_peers import WAYS, Place, save_local
from watch import Watch

TINY = "tiny"
TINY_BYTES = 4 << 20
"""More than a server keeps as a whole, less than a part."""


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _idle_and_all() -> tuple[int, int]:
    """Ticks in which the cores of this machine did nothing, and all of their ticks."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def hashing(place: Place) -> dict[str, float]:
    """CPU that SHA-256 alone takes over the bytes of the shard."""
    data = place.shard.read_bytes()
    times = []
    for _ in range(3):
        began = time.process_time()
        hashlib.sha256(data).digest()
        times.append(time.process_time() - began)
    return {"cpu_s": statistics.median(times)}


def warm_up(name: str, direction: str, place: Place) -> None:
    """The same once with next to nothing: imports and first calls cost what size does not."""
    label = f"{uuid.uuid4().hex}/{TINY}"
    tiny = replace(place, folder=place.folder.parent / TINY, label=label, bytes=TINY_BYTES)
    WAYS[name](tiny, "up").up()
    if direction == "down":
        WAYS[name](tiny, "down").down()


def measure(name: str, direction: str, place: Place, server_pid: int) -> dict[str, Any]:
    warm_up(name, direction, place)
    way = WAYS[name](place, "up" if direction == "up" else "down")
    act = way.up if direction == "up" else way.down
    server, machine, watch = cpu_s(server_pid), _idle_and_all(), Watch()
    cpu, began = time.process_time(), time.perf_counter()
    act()
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu
    idle, everything = (
        after - before for after, before in zip(_idle_and_all(), machine, strict=True)
    )
    return {
        "seconds": seconds,
        "cpu_s": cpu,
        "idle": idle / max(everything, 1),
        "server_cpu_s": cpu_s(server_pid) - server,
        "memory_bytes": watch.stop()[1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="One transfer of tiers.py, in its own process.")
    parser.add_argument("what", choices=["up", "down", "save", "hash"])
    parser.add_argument("name")
    parser.add_argument("place", help="JSON")
    parser.add_argument("--server-pid", type=int, default=0)
    parser.add_argument("--make", nargs="+", metavar="FOLDER=BYTES", default=[])
    options = parser.parse_args()
    described = json.loads(options.place)
    place = Place(**{**described, "folder": Path(described["folder"])})
    result: dict[str, Any] = {}
    if options.what == "save":
        for folder, size in (made.split("=") for made in options.make):
            save_local(place.folder / folder, int(size), also_dcp=options.name == "dcp")
    elif options.what == "hash":
        result = hashing(place)
    else:
        try:
            result = measure(options.name, options.what, place, options.server_pid)
        except ImportError as error:
            result = {"unavailable": f"not installed: {error.name}"}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
