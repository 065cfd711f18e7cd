"""How much smaller each codec makes real training states, and how fast on one core, in one run.

The states are trained by the script itself. Holds no numbers of its own. Knows nothing of how any
side encodes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from codecs_job import DATA, Snapshot, train
from codecs_peers import Peer, peers
from codecs_saves import COLUMNS as SAVES_COLUMNS
from codecs_saves import cells as saves_cells
from codecs_saves import measure_saves
from machine import machine_facts, machine_line
from table import show, show_verdicts, write
from targets import Verdict

from torch_ckpt.codecs.codec import Codec
from torch_ckpt.codecs.names import codec_named
from torch_ckpt.codecs.residual import LossyDelta

DTYPES = {"float32": 4, "bfloat16": 2}
LATER = (1, 10, 100)
NEIGHBOURS_RATIO = 4.0
LOSSY_RATIO = 5.0
SAVES_RATIOS = {
    "LoRA: frozen GPT, adapters": 10.0,
    "sparse-embedding recommender": 10.0,
    "bfloat16 GPT, weights only": 4.0,
}
OURS = "zstd (ours)"
LOSSY = (("weights", "lossy-delta +10"), ("exp_avg", "fp8"), ("exp_avg_sq", "fp8-sqrt"))
COLUMNS = ["dtype", "data", "codec", "ratio", "bits a number", "encode MB/s", "decode MB/s"]
NOTES = """\
MB/s of raw bytes a core (processor time), best of the repeats; lossless blocks are compared
+n: against the same block n steps earlier; lossy-delta: errors up to 1/16 of the change's RMS
saves: incremental=True, every 10 steps; all files of a generation count, parts and manifest too"""

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    facts = machine_facts(Path.cwd())
    print(machine_line(facts), flush=True)
    if facts["load_average"] > facts["cores"] / 2:
        print(f"NOT QUIET: a load of {facts['load_average']} beside it distorts every number")
    first, width, layers = (20, 64, 1) if options.quick else (300, 192, 5)
    rows: dict[str, Row] = {}
    losses: dict[str, Any] = {}
    for dtype in DTYPES:
        steps = [first, *(first + later for later in LATER if later < 100 or not options.quick)]
        print(f"  training in {dtype} for {steps[-1]} steps …", file=sys.stderr, flush=True)
        snapshots = list(train(dtype, steps, width=width, layers=layers))
        losses[dtype] = {snapshot.step: snapshot.loss for snapshot in snapshots}
        for row in measure_all(dtype, snapshots, options.repeats):
            rows[f"{dtype} {row['data']} {row['codec']}"] = row
    print("  training what is saved incrementally …", file=sys.stderr, flush=True)
    saves = measure_saves(quick=options.quick)
    show(COLUMNS, [_cells(row) for row in rows.values()])
    show(SAVES_COLUMNS, [saves_cells(name, row) for name, row in saves.items()])
    print(NOTES)
    verdicts = [*judge(rows), *judge_saves(saves)]
    show_verdicts(verdicts)
    if options.json:
        facts |= {"losses": losses}
        write(options.json, facts, rows | saves, verdicts, quick=options.quick)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    parser.add_argument("--quick", action="store_true", help="a small state: a smoke test only")
    parser.add_argument("--repeats", type=int, default=5, help="times each state is encoded")
    return parser


def measure_all(dtype: str, snapshots: Sequence[Snapshot], repeats: int) -> Iterator[Row]:
    """Every codec on weights and both moments, ours and theirs."""
    size, first = DTYPES[dtype], snapshots[0]
    for data in DATA:
        blocks = first.blocks[data]
        for name, peer in peers(dtype, size).items():
            row = {"dtype": dtype, "data": data, "codec": name, "peer": True}
            yield row | (_clock(peer, blocks, repeats, size) if peer else {"missing": True})
        ours = _codec(codec_named("zstd"), dtype)
        row = {"dtype": dtype, "data": data, "peer": False}
        yield row | {"codec": OURS} | _clock(ours, blocks, repeats, size)
        for later in snapshots[1:]:
            gap = later.step - first.step
            for codec in (codec_named("delta"), LossyDelta()):
                bases = dict(zip(map(id, later.blocks[data]), blocks, strict=True))
                pair = _codec(codec, dtype, bases)
                lossless = codec.lossless
                measured = _clock(pair, later.blocks[data], repeats, size, lossless=lossless)
                yield row | {"codec": f"{codec.name} +{gap}"} | measured
        for of, name in LOSSY[1:]:
            if of == data:
                pair = _codec(codec_named(name), dtype)
                yield row | {"codec": name} | _clock(pair, blocks, repeats, size, lossless=False)


def _codec(codec: Codec, dtype: str, bases: dict[int, memoryview] | None = None) -> Peer:
    """One of ours on the peers' terms: a stream travels with its length and base."""

    def encode(raw: memoryview) -> tuple[Any, int, memoryview | None]:
        base = None if bases is None else bases[id(raw)]
        return codec.encode(raw, dtype=dtype, base=base), raw.nbytes, base

    def decode(stored: tuple[Any, int, memoryview | None]) -> Any:
        stream, raw_bytes, base = stored
        if stream is None:
            return None
        return codec.decode(memoryview(stream), raw_bytes=raw_bytes, base=base)

    return Peer(encode, decode, lambda raw: raw)


def _clock(
    peer: Peer, blocks: list[memoryview], repeats: int, itemsize: int, *, lossless: bool = True
) -> Row:
    """Encode and decode all blocks, several times."""
    raw_bytes = sum(block.nbytes for block in blocks)
    encode_s, decode_s, stored_bytes = [], [], 0
    for _ in range(repeats + 1):  # once to warm up
        ready = [peer.prepare(block) for block in blocks]
        seconds, stored = _timed(peer.encode, ready)
        encode_s.append(seconds)
        seconds, back = _timed(peer.decode, stored)
        decode_s.append(seconds)
        stored_bytes = sum(map(_size, stored, blocks))
        for block, found in zip(blocks, back, strict=True):
            if lossless and found is not None:
                assert bytes(found) == block
    return {
        "ratio": raw_bytes / stored_bytes,
        "bits": 8 * itemsize * stored_bytes / raw_bytes,
        "encode_mb_s": raw_bytes / min(encode_s[1:]) / 1e6,
        "decode_mb_s": raw_bytes / min(decode_s[1:]) / 1e6,
        "raw_bytes": raw_bytes,
        "stored_bytes": stored_bytes,
    }


def _timed(work: Callable[[Any], Any], items: list[Any]) -> tuple[float, list[Any]]:
    """Processor time: what runs beside it, and threads that a side may start, do not flatter it."""
    began = time.process_time()
    done = [work(item) for item in items]
    return time.process_time() - began, done


def _size(stored: Any, raw: memoryview) -> int:
    stream = stored[0] if isinstance(stored, tuple) else stored
    return raw.nbytes if stream is None else len(stream)


def judge(rows: dict[str, Row]) -> list[Verdict]:
    """Ahead of every peer that is installed, and as small as was promised."""
    verdicts = []
    for dtype in DTYPES:
        for data in DATA:
            ours = rows[f"{dtype} {data} {OURS}"]
            theirs = [
                row
                for row in rows.values()
                if row["dtype"] == dtype and row["data"] == data and row["peer"] and "ratio" in row
            ]
            for field, what in (("ratio", "smaller"), ("encode_mb_s", "encoded faster")):
                best = max(theirs, key=lambda row, field=field: row[field])
                verdicts.append(
                    Verdict(
                        target=f"{dtype} {data}: {what} than by every peer",
                        measured=f"{ours[field] / best[field]:.3f} ×",
                        verdict="reached" if ours[field] > best[field] else "missed",
                        detail=f"{ours[field]:.4g}; {best['codec']} {best[field]:.4g}",
                    )
                )
    near = rows["bfloat16 weights delta +10"]
    verdicts.append(
        Verdict(
            target=f"bfloat16 weights, delta +10: ≥ {NEIGHBOURS_RATIO:.0f} ×",
            measured=f"{near['ratio']:.2f} ×",
            verdict="reached" if near["ratio"] >= NEIGHBOURS_RATIO else "missed",
            detail=f"{near['bits']:.2f} bits a number",
        )
    )
    parts = [rows[f"float32 {data} {codec}"] for data, codec in LOSSY]
    ratio = sum(row["raw_bytes"] for row in parts) / sum(row["stored_bytes"] for row in parts)
    verdicts.append(
        Verdict(
            target=f"float32, lossy delta and fp8 moments: ≥ {LOSSY_RATIO:.0f} ×",
            measured=f"{ratio:.2f} ×",
            verdict="reached" if ratio >= LOSSY_RATIO else "missed",
            detail=f"{sum(row['bits'] for row in parts):.1f} bits a parameter",
        )
    )
    return verdicts


def judge_saves(saves: dict[str, Row]) -> list[Verdict]:
    """The largest generation but the first, against what it holds."""
    return [
        Verdict(
            target=f"{name}, saved incrementally: ≥ {least:.0f} ×",
            measured=f"{saves[name]['ratio']:.1f} ×",
            verdict="reached" if saves[name]["ratio"] >= least else "missed",
            detail=f"changed: {saves[name]['changes']}",
        )
        for name, least in SAVES_RATIOS.items()
    ]


def _cells(row: Row) -> list[str]:
    name = [row["dtype"], row["data"], row["codec"]]
    if "missing" in row:
        return [*name, "not installed", "–", "–", "–"]
    return [
        *name,
        f"{row['ratio']:.3f}",
        f"{row['bits']:.2f}",
        f"{row['encode_mb_s']:.0f}",
        f"{row['decode_mb_s']:.0f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
