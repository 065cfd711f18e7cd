"""Up to an object store and back: this package beside the usual clients, one state, one server.

Every transfer runs in a fresh process; the ways take turns at going first. Then a training process
is killed and resumes from each tier. Holds no numbers of its own. Knows nothing of how a way works.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from machine import machine_facts, machine_line
from restart import restarts
from table import show, show_verdicts, write
from targets import Verdict
from tiers_job import TINY, TINY_BYTES
from tiers_judge import DIRECTIONS, judge, of_size
from tiers_peers import WAYS, Place

HERE = Path(__file__).resolve().parent
TRANSFER_TIMEOUT_S = 600
QUICK_BYTES = 16 << 20
COLUMNS = ["", "row", "GB/s", "CPU s/GB", "server's", "extra memory MB", "pace", "idle"]
NOTES = """\
GB/s: median of the repeats; for ours up: every block's SHA-256 compared as it passes, a few read \
back; down: every block's SHA-256 compared before it reaches a tensor
CPU: of the client's process, all threads; extra memory: its peak beyond what it had before, for \
half of the size → for all of it (what a caller holds anyway, as the tensors, is there before)
server's: its own CPU s/GB; pace: `server` where that is more than the client's
idle: of the cores; what is busy is so with this run and with whatever else runs on the machine
s3fs, boto3: into a file, in parts of 16 MiB, 8 at once; the others into memory"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    base: Path = options.dir or Path.cwd()
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="tiers-", dir=base))
    size = QUICK_BYTES if options.quick else options.bytes
    # With a small state, buffers would not be full, so its half would tell nothing.
    turns = {size: options.repeats} if options.quick else {size // 2: 1, size: options.repeats}
    runs: dict[str, Any] = {}
    verdicts: list[Verdict] = []
    try:
        facts = machine_facts(folder)
        print(machine_line(facts), flush=True)
        if facts["load_average"] > facts["cores"] / 2:
            print(f"NOT QUIET: a load of {facts['load_average']} beside it distorts every number")
        for name in options.server:
            with SERVERS[name](folder / name) as server:
                rows, hashing_s = run_rows(folder / name, server, turns, options.rows)
                tiers = {} if options.no_restart else _restarts(folder / name, server, size)
            runs[name] = {"rows": rows, "restarts": tiers, "sha256_cpu_s": hashing_s}
            found = judge(name, rows, size, hashing_s)
            _present(name, rows, tiers, found, size)
            verdicts += found
            shutil.rmtree(folder / name, ignore_errors=True)
        print(f"load at the end: {os.getloadavg()[0]:.1f}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        write(options.json, facts, runs, verdicts, quick=options.quick)
    failed = any("failed" in row for run in runs.values() for row in run["rows"].values())
    return 1 if failed or any("failed" in run["restarts"] for run in runs.values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dir", type=Path, help="where to write; a temporary folder inside it")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    parser.add_argument("--quick", action="store_true", help="a small state: a smoke test only")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of the state")
    parser.add_argument("--repeats", type=int, default=3, help="transfers a row of the whole size")
    parser.add_argument("--server", nargs="+", choices=SERVERS, default=["sink"])
    parser.add_argument("--no-restart", action="store_true", help="transfers only")
    parser.add_argument(
        "--rows", nargs="+", choices=WAYS, default=list(WAYS), help="only these, in this order"
    )
    return parser


@contextmanager
def sink(folder: Path) -> Iterator[dict[str, Any]]:
    """The server that drops what it is sent, and serves the files of `folder`."""
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(HERE / "sink.py"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        yield _described(url, process.pid, "ckpt", ("testing", "testing", "us-east-1"))
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


@contextmanager
def seaweed(folder: Path) -> Iterator[dict[str, Any]]:
    """SeaweedFS, as the tests start it."""
    sys.path.append(str(HERE.parent))
    from tests.s3 import servers

    folder.mkdir()
    with servers.seaweed() as server:
        account = (servers.KEY, servers.SECRET, servers.REGION)
        yield _described(server.endpoint_url, server.pid, server.bucket, account)


SERVERS = {"sink": sink, "seaweed": seaweed}


def _described(url: str, pid: int, bucket: str, account: tuple[str, str, str]) -> dict[str, Any]:
    key, secret, region = account
    place = Place(
        folder=Path(),
        label="",
        bytes=0,
        endpoint_url=url,
        bucket=bucket,
        key=key,
        secret=secret,
        region=region,
    )
    return {"place": place, "pid": pid, "bucket": bucket, "options": place.options}


def run_rows(
    folder: Path, server: dict[str, Any], turns: Mapping[int, int], names: Sequence[str]
) -> tuple[dict[str, Any], float]:
    """Every way up and down, each size as often as `turns` says; the CPU of SHA-256 alone."""
    place = asdict(server["place"]) | {"folder": str(folder)}
    sizes = [f"{TINY}={TINY_BYTES}", *(f"{size}={size}" for size in turns)]
    kind = "dcp" if "dcp" in names else "ours"
    if "failed" in (made := _job("save", kind, place, server["pid"], "--make", *sizes)):
        raise RuntimeError(made["failed"])
    rows: dict[str, Any] = {name: {"title": WAYS[name].title} for name in names}
    for direction in DIRECTIONS:
        for bytes_, repeats in turns.items():
            for turn in range(repeats):
                first = turn % len(names)
                for name in [*names[first:], *names[:first]]:
                    if {"unavailable", "failed"} & rows[name].keys():
                        continue
                    found = _transfer(folder, server, bytes_, name, direction, turn)
                    if "seconds" in found:
                        taken = rows[name].setdefault(direction, {})
                        taken.setdefault(str(bytes_), []).append(found)
                    else:
                        rows[name] |= found
    hashed = _job("hash", kind, place | {"folder": str(folder / str(max(turns)))}, server["pid"])
    return rows, hashed["cpu_s"]


def _transfer(
    base: Path, server: dict[str, Any], size: int, name: str, direction: str, turn: int
) -> dict[str, Any]:
    folder = base / str(size)
    # Every upload has a place of its own: what is there already is not sent.
    turn = turn if direction == "up" else 0
    described = asdict(server["place"]) | {"label": f"{name}-{turn}/{size}", "bytes": size}
    place = described | {"folder": str(folder)}
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()  # into the page cache
    print(f"  {name} {direction} {size / 1e6:.0f} MB …", end="", file=sys.stderr, flush=True)
    began = time.perf_counter()
    result = _job(direction, name, place, server["pid"])
    print(f" {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    shutil.rmtree(folder / "down", ignore_errors=True)
    return result


def _job(
    what: str, name: str, place: dict[str, Any], server_pid: int, *more: str
) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(HERE / "tiers_job.py"), what, name, json.dumps(place)]
    try:
        done = subprocess.run(
            [*command, "--server-pid", str(server_pid), *more],
            capture_output=True,
            text=True,
            timeout=TRANSFER_TIMEOUT_S,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"{what} took more than {TRANSFER_TIMEOUT_S} s"}
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        # Some clients add a trace of their own below the error.
        errors = [line for line in said if re.match(r"[\w.]+(Error|Exception|Found)\b", line)]
        return {"failed": f"{what}: {(errors or said)[-1]}", "log": said}
    return json.loads(done.stdout.splitlines()[-1])


def _restarts(base: Path, server: dict[str, Any], size: int) -> dict[str, Any]:
    print("  restarts …", end="", file=sys.stderr, flush=True)
    began = time.perf_counter()
    folder = base / "restart"
    folder.mkdir()
    try:
        return restarts(folder, "trainer/restart", size, server)
    except RuntimeError as error:
        return {"failed": str(error)}
    finally:
        print(f" {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)


def _present(
    server: str,
    rows: dict[str, Any],
    tiers: dict[str, Any],
    verdicts: list[Verdict],
    size: int,
) -> None:
    print(f"\nserver {server}, on the same machine; state {size / 1e9:.3f} GB")
    show(COLUMNS, [_cells(row, way, size) for way in DIRECTIONS for row in rows.values()])
    print(NOTES)
    if "failed" in tiers:
        print(f"restarts FAILED: {tiers['failed']}")
    elif tiers:
        columns = ["from SIGKILL to the first step, from", "seconds", "start", "resume", "step"]
        lines = [
            [tier, *(f"{one[field]:.2f}" for field in ("seconds", "start_s", "resume_s", "step_s"))]
            for tier, one in tiers.items()
        ]
        show(columns, lines)
        print("start: imports of Python and torch; resume: find, read, verify, fill")
    show_verdicts(verdicts)
    sys.stdout.flush()


def _cells(row: dict[str, Any], direction: str, size: int) -> list[str]:
    if "unavailable" in row:
        return [direction, row["title"], row["unavailable"]]
    taken = of_size(row, direction, size)
    if not taken:
        return [direction, row["title"], f"FAILED: {row.get('failed', 'not measured')}"]
    half = of_size(row, direction, size // 2)
    middle = {name: statistics.median(one[name] for one in taken) for name in taken[0]}
    memory = [max(one["memory_bytes"] for one in some) for some in (half, taken) if some]
    return [
        direction,
        row["title"],
        f"{size / 1e9 / middle['seconds']:.2f}",
        f"{middle['cpu_s'] / (size / 1e9):.2f}",
        f"{middle['server_cpu_s'] / (size / 1e9):.2f}",
        " → ".join(f"{value / 1e6:.0f}" for value in memory),
        "server" if middle["server_cpu_s"] > middle["cpu_s"] else "client",
        f"{middle['idle']:.0%}",
    ]


if __name__ == "__main__":
    sys.exit(main())
