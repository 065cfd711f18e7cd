"""Kill a training job, run the same command again, and compare with a run nobody interrupted.

    make demo

Starts `lightning_gpt.py` in a process of its own, sends it SIGKILL in the middle of an epoch, and
reads what it left in its folder. Knows the job's command line and files. Knows nothing of how a
save is done.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from showing import DemoFailed, Display, carry_out, fresh_folder, parser_for

from torch_ckpt import Checkpointer

FOLDER = Path("demo-run")
MARK = ".made-by-torch-ckpt-demo"
JOB = Path(__file__).resolve().with_name("lightning_gpt.py")
BATCH = 8
POLL_S = 0.05
TAIL_LINES = 20


# ── the job ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command, in one folder, that can be run again."""

    root: Path
    steps: int
    save_every: int
    epoch_steps: int
    more: tuple[str, ...] = ()
    """Further options of the command."""

    def start(self, lock: IO[str]) -> subprocess.Popen[bytes]:
        """Run the command; it holds the lock too, so that no other demo takes its folder away."""
        command = [sys.executable, str(JOB), f"--root={self.root}", f"--steps={self.steps}"]
        command += [f"--save-every={self.save_every}", f"--batch={BATCH}"]
        command += [f"--windows={self.epoch_steps * BATCH}", *self.more]
        self.root.mkdir(exist_ok=True)
        with (self.root / "stderr.txt").open("wb") as errors:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[lock.fileno()],
                start_new_session=True,  # Ctrl-C comes to the demo, which ends the job itself
            )

    def lines(self) -> list[dict[str, Any]]:
        """What the job noted of each step it began; the last line may be half written."""
        path = self.root / "samples.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def samples(self) -> dict[int, list[int]]:
        """What each step was trained on; of a step done twice, the second time."""
        return {line["step"]: line["samples"] for line in self.lines()}

    def committed(self) -> set[str]:
        """The generations there are at this moment."""
        return {path.parent.name for path in self.root.glob("checkpoints/*/manifest.json")}

    def result(self) -> dict[str, Any]:
        """Digests of the state after the last step."""
        return json.loads((self.root / "result.json").read_text())

    def blocked_s(self) -> list[float]:
        """For how long training stood still for each save, as the job logged it."""
        found: list[float] = []
        for path in sorted(self.root.glob("lightning_logs/*/metrics.csv")):
            with path.open(newline="") as file:
                values = [row.get("ckpt/blocked_s") for row in csv.DictReader(file)]
            for value in (float(value) for value in values if value):
                if not found or found[-1] != value:  # a value is logged until there is a new one
                    found.append(value)
        last = self.result()["blocked_s"]
        return found if found[-1:] == [last] else [*found, last]

    def finish_writing(self) -> None:
        """Return once the writer of a job that was killed has committed what it held."""
        with Checkpointer(self.root / "checkpoints", distributed=False) as checkpointer:
            checkpointer.latest()

    def failure(self, code: int) -> DemoFailed:
        """How the job ended, in its own words."""
        if code == 0:
            return DemoFailed("training ended before it was killed; give it more --steps")
        tail = (self.root / "stderr.txt").read_text(errors="replace").splitlines()[-TAIL_LINES:]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return DemoFailed("\n".join([f"the training job ended with {how}:", *tail]))


def end(process: subprocess.Popen[bytes], job: Job) -> None:
    """Kill the job, and let its writer finish."""
    process.kill()
    process.wait()
    if job.committed():
        job.finish_writing()


# ── the three parts ───────────────────────────────────────────────────────────────────────────


def run_until_killed(job: Job, display: Display, lock: IO[str], chance: random.Random) -> int:
    """Train until a random moment in mid-epoch, after two commits; the last step begun."""
    first = 2 * job.save_every + 2
    choices = range(first, max(first + 1, job.steps * 4 // 5))
    inside = [step for step in choices if 1 < step % job.epoch_steps < job.epoch_steps - 1]
    target, delay = chance.choice(inside or list(choices)), chance.random()
    display.begin("train, until SIGKILL")
    seen: set[str] = set()
    process = job.start(lock)
    try:
        while True:
            seen |= job.committed()
            lines = job.lines()
            step = lines[-1]["step"] if lines else 0
            display.show(step)
            if process.poll() is not None:
                raise job.failure(process.returncode)
            if step >= target and len(seen) >= 2:
                break
            time.sleep(POLL_S)
        time.sleep(delay * (lines[-1]["time"] - lines[-2]["time"]))
    finally:
        end(process, job)
    if process.returncode != -signal.SIGKILL:
        raise job.failure(process.returncode)
    return job.lines()[-1]["step"]


def run_to_end(job: Job, display: Display, lock: IO[str], text: str) -> None:
    """Run the command until it is done."""
    display.begin(text)
    before = len(job.lines())
    process = job.start(lock)
    try:
        while process.poll() is None:
            lines = job.lines()
            if len(lines) > before:
                display.show(lines[-1]["step"])
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            end(process, job)
    if process.returncode:
        raise job.failure(process.returncode)
    display.show(job.steps)


# ── the report ────────────────────────────────────────────────────────────────────────────────


def report(console: Console, killed: Job, whole: Job, facts: list[list[str]]) -> bool:
    """Show what happened; whether everything is equal."""
    ours, theirs = killed.result(), whole.result()
    names = {"weights": "weights", "optimizer": "optimizer state", "rng": "random state"}
    equal = {text: ours[name] == theirs[name] for name, text in names.items()}
    samples = whole.samples()
    equal["order of samples"] = killed.samples() == samples and len(samples) == whole.steps
    for name, text in facts:
        console.print(f"{name:<19} {text}")
    console.print("\nbeside a run that was not killed, bit for bit the same?")
    for name, same in equal.items():
        console.print(f"{name:<19} {'[green]yes[/]' if same else '[bold red]no[/]'}")
    return all(equal.values())


def facts_of(killed: Job, whole: Job, *, begun: int, resumed: int, seed: int) -> list[list[str]]:
    """What was done and what it cost; `begun` is the last step before the kill."""
    millions = whole.result()["parameters"] / 1e6
    epoch, at = divmod(begun - 1, killed.epoch_steps)
    place = f"{at + 1} of {killed.epoch_steps} in epoch {epoch + 1}"
    blocked, lines = whole.blocked_s(), whole.lines()
    training_s = lines[-1]["time"] - lines[0]["time"]
    median, longest = 1000 * statistics.median(blocked), 1000 * max(blocked)
    share = 100 * sum(blocked) / training_s
    return [
        ["trained", f"a GPT of {millions:.1f} M parameters, {whole.steps} steps"],
        ["killed", f"SIGKILL in step {begun}, {place} (--seed {seed})"],
        ["resumed", f"by the same command, after step {resumed}"],
        ["steps lost", f"{begun - resumed}, trained again" if begun > resumed else "0"],
        ["blocked per save", f"{median:.1f} ms median, {longest:.1f} ms max"],
        ["share of training", f"{share:.2g} % ({len(blocked)} saves in {training_s:.0f} s)"],
    ]


# ── the command ───────────────────────────────────────────────────────────────────────────────


def run(options: argparse.Namespace, console: Console) -> bool:
    """All three parts and the report; whether everything is equal."""
    with fresh_folder(FOLDER, MARK) as lock:
        shape = {"steps": options.steps, "save_every": options.save_every}
        shape["epoch_steps"] = max(4, options.steps * 2 // 5)
        killed, whole = Job(root=FOLDER / "killed", **shape), Job(root=FOLDER / "whole", **shape)
        display = Display(console, options.steps)
        with display.progress:
            begun = run_until_killed(killed, display, lock, random.Random(options.seed))
            before = len(killed.lines())
            run_to_end(killed, display, lock, "the same command again")
            run_to_end(whole, display, lock, "once uninterrupted")
        resumed = killed.lines()[before]["step"] - 1
        facts = facts_of(killed, whole, begun=begun, resumed=resumed, seed=options.seed)
        same = report(console, killed, whole, facts)
    if same and not options.keep:
        shutil.rmtree(FOLDER)
    else:
        console.print(f"\nkept: {FOLDER}  (torch-ckpt ls {killed.root}/checkpoints)")
    return same


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_for(__doc__ or "", steps=240, seed="moment of the kill", folder=str(FOLDER))
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    options = parser.parse_args(arguments)
    if options.save_every < 1 or options.steps < 5 * options.save_every:
        parser.error("--steps must be at least five times --save-every, which must be at least 1")
    return carry_out("demo", run, options)


if __name__ == "__main__":
    sys.exit(main())
