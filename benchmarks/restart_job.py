"""A small training process to be killed: resumes, trains, saves once, says what it does.

Prints JSON lines. Knows the three tiers' places. Knows nothing of who kills it, or when.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

BEGAN = time.time()
SAVE_AT = 3


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="The training process that tiers.py kills.")
    parser.add_argument("job", help="JSON: primary, archive, cache, options, bytes")
    job = json.loads(parser.parse_args().job)

    from tiers_peers import state_of

    from torch_ckpt import Checkpointer
    from torch_ckpt.generations.catalog import Catalog
    from torch_ckpt.storage.store import open_store

    imported = time.time()
    state = state_of(job["bytes"])
    checkpointer = Checkpointer(
        job["primary"],
        archive=job["archive"],
        cache=job["cache"],
        archive_options=job["options"],
        distributed=False,
    )
    before = time.time()
    resumed = checkpointer.resume(state)
    after = time.time()
    step = resumed.step if resumed else 0
    while True:
        for tensor in state.values():
            tensor.add_(1)
        step += 1
        now = time.time()
        say(
            step=step,
            at=now,
            source=resumed.url if resumed else None,
            start_s=imported - BEGAN,
            resume_s=after - before,
            step_s=now - after,
        )
        if step == SAVE_AT:
            checkpointer.save(state, step, block="committed")
            cache = Catalog(open_store(job["cache"]))
            while checkpointer.archive_lag or not cache.committed():
                time.sleep(0.02)
            say(kept=step)
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
