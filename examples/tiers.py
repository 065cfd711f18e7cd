"""Lose the file system in mid-training, and go on from object storage as if nothing had happened.

    python examples/tiers.py

Starts an S3 server of its own on this machine (moto, from the `dev` extra), trains
`lightning_gpt.py` with an archive there and a cache, kills it, deletes its folder and its cache,
and runs the same command again; 37 s of CPU. Knows the job's command line and files, and where its
tiers are. Knows nothing of how a generation comes into a tier.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from demo import MARK, POLL_S, Job, end, report, run_to_end
from rich.console import Console
from showing import DemoFailed, Display, carry_out, fresh_folder, parser_for

from torch_ckpt import Checkpointer, load_generation

FOLDER = Path("tiers-run")
BUCKET = "tiers-demo"
ARCHIVE = f"s3://{BUCKET}/killed"
ARCHIVED_S = 60.0
SERVER = """
import sys
import boto3
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
url = "http://%s:%d" % server.get_host_and_port()
boto3.client("s3", endpoint_url=url).create_bucket(Bucket=sys.argv[1])
print(url, flush=True)
sys.stdin.read()
"""
"""Listens on a port that is free, says which, and ends with whoever started it, whatever way."""
RESUMED = re.compile(r"^resumed step (\d+) from (.+)/[^/]+ \(", re.MULTILINE)


# ── the tiers ─────────────────────────────────────────────────────────────────────────────────


@contextmanager
def object_storage(folder: Path) -> Iterator[None]:
    """An empty bucket, which this process and those that it starts find as they would find S3."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_DEFAULT_REGION": "us-east-1",
        # The server is on the job's own cores, which threads that wait by spinning would hold.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    log = folder / "server.txt"
    with log.open("wb") as errors:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, BUCKET],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        url = server.stdout.readline().strip() if server.stdout is not None else ""
        if not url:
            last = log.read_text(errors="replace").splitlines()[-1:]
            raise DemoFailed(f"no S3 server (pip install 'torch-ckpt[dev]'): {''.join(last)}")
        os.environ["AWS_ENDPOINT_URL"] = url
        yield
    finally:
        server.kill()
        server.communicate()


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Where a job keeps its generations."""

    job: Job
    cache: Path

    @property
    def places(self) -> dict[str, str]:
        """Nearest first."""
        primary = self.job.root / "checkpoints"
        return {"cache": str(self.cache), "primary": str(primary), "archive": ARCHIVE}

    def steps(self, tier: str) -> list[int]:
        """What a tier holds by itself."""
        with Checkpointer(self.places[tier], distributed=False) as checkpointer:
            return sorted(one.step for one in checkpointer.generations())

    def seconds(self, tier: str, step: int) -> float:
        """How long it takes to read a whole generation from a tier, every block verified."""
        began = time.perf_counter()
        load_generation(self.places[tier], step)
        return time.perf_counter() - began

    def lose(self) -> None:
        """Delete whatever is not in the archive."""
        for tier in ("primary", "cache"):
            shutil.rmtree(self.places[tier])

    def source(self) -> tuple[int, str]:
        """The step that the job started from last, and the tier that gave it."""
        text = (self.job.root / "log.txt").read_text(errors="replace")
        found = RESUMED.findall(text)
        for tier, place in self.places.items():
            if found and found[-1][1] in {place, os.path.abspath(place)}:
                return int(found[-1][0]), tier
        raise DemoFailed(f"the same command did not resume; its log says:\n{text}")


# ── the parts ─────────────────────────────────────────────────────────────────────────────────


def run_until_killed(job: Job, display: Display, lock: IO[str], chance: random.Random) -> int:
    """Train until some steps after a save, at least the third one; the last step begun."""
    last = max(3, job.steps * 4 // 5 // job.save_every)
    target = chance.randrange(3, last + 1) * job.save_every + max(3, job.save_every // 2)
    display.begin("train, until SIGKILL")
    process = job.start(lock)
    try:
        step = 0
        while step < target:
            if process.poll() is not None:
                raise job.failure(process.returncode)
            lines = job.lines()
            step = lines[-1]["step"] if lines else 0
            display.show(step)
            time.sleep(POLL_S)
    except BaseException:
        end(process, job)
        raise
    process.kill()
    if (code := process.wait()) != -signal.SIGKILL:
        raise job.failure(code)
    return job.lines()[-1]["step"]


def await_archive(tiers: Tiers, begun: int) -> tuple[int, float]:
    """Give the writer that the job left behind time to finish: the newest step archived, seconds.

    A new trainer, or whoever else opens the run, would hurry it.
    """
    began = time.monotonic()
    expected = (begun - 1) // tiers.job.save_every * tiers.job.save_every
    while True:
        steps = tiers.steps("archive")
        passed = time.monotonic() - began
        if (steps and steps[-1] >= expected) or (steps and passed > ARCHIVED_S):
            break
        if passed > ARCHIVED_S:
            raise DemoFailed(f"nothing was archived within {ARCHIVED_S:g} s")
        time.sleep(POLL_S)
    tiers.job.finish_writing()
    return steps[-1], passed


def run(options: argparse.Namespace, console: Console) -> bool:
    """All parts and the report; whether everything is equal."""
    with fresh_folder(FOLDER, MARK) as lock, object_storage(FOLDER):
        shape = {"steps": options.steps, "save_every": options.save_every}
        shape["epoch_steps"] = max(4, options.steps * 2 // 5)
        root, cache = FOLDER / "killed", FOLDER / "cache"
        more = (f"--archive={ARCHIVE}", f"--cache={cache}", f"--log={root / 'log.txt'}")
        killed = Job(root=root, more=more, **shape)
        whole = Job(root=FOLDER / "whole", **shape)
        tiers = Tiers(job=killed, cache=cache)
        display = Display(console, options.steps)
        with display.progress:
            begun = run_until_killed(killed, display, lock, random.Random(options.seed))
            newest, archived_s = await_archive(tiers, begun)
            held = {tier: tiers.steps(tier) for tier in tiers.places}
            tiers.lose()
            before, began = len(killed.lines()), time.time()
            run_to_end(killed, display, lock, "the same command again")
            run_to_end(whole, display, lock, "once uninterrupted, without tiers")
        first_s = killed.lines()[before]["time"] - began
        step, tier = tiers.source()
        facts = [
            ["trained", f"{killed.steps} steps, a save every {killed.save_every}"],
            ["killed", f"SIGKILL in step {begun} (--seed {options.seed})"],
            ["archived", f"step {newest}, by the writer left behind, {archived_s:.1f} s later"],
            ["then deleted", f"primary (steps {words(held['primary'])}) and cache"],
            ["resumed", f"after step {step}, from the {tier}; first step {first_s:.1f} s later"],
            ["steps lost", f"{begun - step}, trained again"],
            *costs(tiers, whole),
        ]
        same = report(console, killed, whole, facts) and tier == "archive"
    if same and not options.keep:
        shutil.rmtree(FOLDER)
    else:
        console.print(f"\nkept: {FOLDER}, but for the archive  (torch-ckpt ls {root}/checkpoints)")
    return same


def costs(tiers: Tiers, whole: Job) -> list[list[str]]:
    """What the tiers hold in the end, how soon they give it, and what training paid for them."""
    kept = {tier: tiers.steps(tier) for tier in tiers.places}
    seconds = {tier: tiers.seconds(tier, steps[-1]) for tier, steps in kept.items()}
    size = sum(path.stat().st_size for path in tiers.cache.rglob("*.safetensors")) / 1e6
    blocked = [1000 * statistics.median(job.blocked_s()) for job in (tiers.job, whole)]
    return [
        ["blocked per save", f"{blocked[0]:.1f} ms, without tiers {blocked[1]:.1f} ms (medians)"],
        ["generations now", ", ".join(f"{tier} {len(steps)}" for tier, steps in kept.items())],
        [f"to read {size:.0f} MB", ", ".join(f"{tier} {s:.2f} s" for tier, s in seconds.items())],
    ]


def words(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


# ── the command ───────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_for(__doc__ or "", steps=60, seed="moment of the kill", folder=str(FOLDER))
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    options = parser.parse_args(arguments)
    if options.save_every < 6 or options.steps < 5 * options.save_every:
        parser.error("--steps must be at least five times --save-every, which must be at least 6")
    return carry_out("tiers", run, options)


if __name__ == "__main__":
    sys.exit(main())
