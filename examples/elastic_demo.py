"""Kill ranks of `fsdp_elastic.py`, go on with other numbers of them, and compare the loss curve.

    python examples/elastic_demo.py

Starts torchrun on 4 processes and kills one rank, then everything; goes on with 2 and with 3.
Knows the job's command line and what it prints. Knows nothing of how a save is done.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from showing import DemoFailed, Display, carry_out, fresh_folder, parser_for

from torch_ckpt import load_generation

JOB = Path(__file__).resolve().with_name("fsdp_elastic.py")
MARK = ".made-by-torch-ckpt-elastic-demo"
SAVE_EVERY = 5
TOLERANCE = 1e-3
"""Of a loss at another number of ranks: sums are then rounded in another order."""
POLL_S = 0.02
TAIL_LINES = 20

BEGIN = re.compile(r"^rank \d+ of (\d+), process (\d+), at step (\d+)$", re.MULTILINE)
STEP = re.compile(r"^step (\d+)  loss", re.MULTILINE)


# ── the job ───────────────────────────────────────────────────────────────────────────────────


@dataclass(kw_only=True)
class Launch:
    """One torchrun of the job, and what it has printed so far."""

    world_size: int
    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        """What was printed; the last line may be half written."""
        return self.log.read_text(errors="replace")

    def step(self) -> int:
        """The last step that was saved; the one it began at before there is one."""
        lines = [*BEGIN.finditer(self.text()), *STEP.finditer(self.text())]
        return max((int(line[line.lastindex or 0]) for line in lines), default=0)

    def ranks(self, start: int = 0) -> dict[int, int]:
        """Process ids of its first ranks, or of those after so many restarts, and their steps."""
        found = [(int(line[2]), int(line[3])) for line in BEGIN.finditer(self.text())]
        return dict(found[start * self.world_size : (start + 1) * self.world_size])

    def began_at(self, start: int = 0) -> int:
        """The step at which all ranks began.

        Raises:
            DemoFailed: they did not begin at the same one.
        """
        steps = sorted(set(self.ranks(start).values()))
        if len(steps) != 1:
            raise DemoFailed(f"ranks went on at different steps: {steps}")
        return steps[0]

    def failure(self) -> DemoFailed:
        """How it ended, in its own words."""
        code = self.process.returncode
        if code == 0:
            return DemoFailed("training ended before it was killed; give it more --steps")
        tail = [line for line in self.text().splitlines() if not BEGIN.match(line)][-TAIL_LINES:]
        return DemoFailed("\n".join([f"the training job ended with exit code {code}:", *tail]))

    def kill_everything(self) -> None:
        """SIGKILL for torchrun and all its ranks, as when a job is taken away."""
        self.process.kill()
        self.process.wait()  # it starts nothing any more
        for pid in self.ranks(max(0, len(BEGIN.findall(self.text())) // self.world_size - 1)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def launch(root: Path, world_size: int, options: argparse.Namespace) -> Iterator[Launch]:
    """The job on so many processes; nothing of it is left at the end."""
    log = root.with_name(f"{root.name}-on-{world_size}.txt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += [f"--nproc-per-node={world_size}", str(JOB), f"--root={root}"]
    command += [f"--steps={options.steps}", f"--save-every={SAVE_EVERY}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **os.environ},
            start_new_session=True,  # Ctrl-C comes to the demo, which ends the job itself
        )
    try:
        yield Launch(world_size=world_size, process=process, log=log)
    finally:
        process.terminate()  # torchrun takes its ranks along
        process.wait()


# ── the parts ─────────────────────────────────────────────────────────────────────────────────


class Parts(Display):
    """Shows how far a launch is."""

    def follow(self, job: Launch, *, step: int, start: int = 0) -> None:
        """Return once all ranks have begun and a step is saved.

        Raises:
            DemoFailed: the job ended before.
        """
        while len(job.ranks(start)) < job.world_size or job.step() < step:
            self.show(job.step())
            if job.process.poll() is not None:
                raise job.failure()
            time.sleep(POLL_S)

    def finish(self, job: Launch) -> None:
        """Return once the job is done.

        Raises:
            DemoFailed: it failed.
        """
        while job.process.poll() is None:
            self.show(job.step())
            time.sleep(POLL_S)
        if job.process.returncode:
            raise job.failure()
        self.show(self._steps)


def tell_story(
    root: Path, display: Parts, options: argparse.Namespace
) -> tuple[list[list[str]], int]:
    """Train with three interruptions; what happened, a line each, and the last step done by 4."""
    chance = random.Random(options.seed)
    facts: list[list[str]] = []
    steps = [SAVE_EVERY * round(options.steps * part / SAVE_EVERY) for part in (0.25, 0.45, 0.7)]

    display.begin("on 4, until one rank and then all are killed")
    with launch(root, 4, options) as job:
        display.follow(job, step=steps[0])
        victim = chance.choice(sorted(job.ranks()))
        os.kill(victim, signal.SIGKILL)
        saved = job.step()
        display.follow(job, step=0, start=1)
        facts.append(["on 4 processes", f"SIGKILL for one rank when step {saved} was saved"])
        facts.append(["", f"torchrun started all 4 again, at step {job.began_at(1)}"])
        display.follow(job, step=steps[1])
        job.kill_everything()
        facts.append(["", f"SIGKILL for everything when step {job.step()} was saved"])
    display.begin("on 2, until all are killed")
    with launch(root, 2, options) as job:
        display.follow(job, step=steps[2])
        job.kill_everything()
        on_4 = job.began_at()
        facts.append(["on 2 processes", f"went on at step {on_4}"])
        facts.append(["", f"SIGKILL for everything when step {job.step()} was saved"])
    display.begin("on 3, to the end")
    with launch(root, 3, options) as job:
        display.finish(job)
        facts.append(["on 3 processes", f"went on at step {job.began_at()}, to the end"])
    return facts, on_4


# ── the report ────────────────────────────────────────────────────────────────────────────────


def losses_of(root: Path, step: int) -> list[float]:
    """The loss curve, which is a part of the state."""
    return load_generation(root, step, allow_pickle=False)["place"]["losses"]


def report(console: Console, ours: list[float], theirs: list[float], on_4: int) -> bool:
    """Compare two loss curves, of which the first `on_4` steps were done by 4 processes each."""
    same = ours[:on_4] == theirs[:on_4]
    pairs = zip(ours[on_4:], theirs[on_4:], strict=True)
    apart = max(abs(a - b) for a, b in pairs)
    near = len(ours) == len(theirs) and apart <= TOLERANCE
    console.print("\nthe loss curve beside that of a run on 4 that was not killed")
    for steps, question, fine in (
        (f"steps 1 to {on_4}", "the same, bit for bit?", same),
        (f"steps {on_4 + 1} to {len(ours)}", f"within {TOLERANCE:g}?", near),
    ):
        answer = "[green]yes[/]" if fine else "[bold red]no[/]"
        console.print(f"{steps:<19} {question} {answer}")
    console.print(f"{'':<19} greatest difference {apart:.1e}, last loss {ours[-1]:.4f}")
    return same and near


# ── the command ───────────────────────────────────────────────────────────────────────────────


def run(options: argparse.Namespace, console: Console) -> bool:
    """The story, the run beside it and the report; whether the curves agree."""
    killed, whole = options.root / "killed", options.root / "whole"
    with fresh_folder(options.root, MARK):
        display = Parts(console, options.steps)
        with display.progress:
            facts, on_4 = tell_story(killed, display, options)
            display.begin("on 4, uninterrupted")
            with launch(whole, 4, options) as job:
                display.finish(job)
    for name, text in facts:
        console.print(f"{name:<19} {text}")
    same = report(console, losses_of(killed, options.steps), losses_of(whole, options.steps), on_4)
    if same and not options.keep:
        shutil.rmtree(options.root)
    else:
        console.print(f"\nkept: {options.root}  (torch-ckpt ls {killed})")
    return same


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_for(__doc__ or "", steps=60, seed="choice of the rank", folder="the folder")
    parser.add_argument("--root", type=Path, default=Path("elastic-demo-run"))
    options = parser.parse_args(arguments)
    if options.steps < 4 * SAVE_EVERY:
        parser.error(f"--steps must be at least {4 * SAVE_EVERY}")
    return carry_out("elastic_demo", run, options)


if __name__ == "__main__":
    sys.exit(main())
