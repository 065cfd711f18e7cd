"""The promises that a run is held to, judged from that run's own numbers alone.

Knows the limits and the fields of the rows. Knows nothing of how they were measured or are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

EAGER_OF_FLOOR = 1.25
OVERLAPPED_OF_FLOOR = 0.1
PERSIST_OF_LIMIT = 0.8
LOAD_OF_SAFETENSORS = 0.7
LOAD_OF_HASHING = 0.8
START_S = 0.05
EAGER_OF_STOCK = 0.25
OVERLAPPED_OF_STOCK = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One target: what was promised, what came out, and the numbers behind it."""

    target: str
    measured: str
    verdict: str
    """`reached`, `missed`, `bound` by a limit that is shown, or `not measured`."""

    detail: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def judge(rows: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """One verdict per target, also for those whose row is missing."""
    eager, overlapped = rows.get("ours-eager", {}), rows.get("ours-overlapped", {})
    return [
        _blocked("eager blocked, first save", eager, "first_blocked_s", EAGER_OF_FLOOR),
        _blocked("eager blocked, median", eager, "median_blocked_s", EAGER_OF_FLOOR),
        _blocked(
            "overlapped blocked, first save", overlapped, "first_blocked_s", OVERLAPPED_OF_FLOOR
        ),
        _blocked("overlapped blocked, median", overlapped, "median_blocked_s", OVERLAPPED_OF_FLOOR),
        _persist(eager),
        _load(eager),
        _start(eager),
        _of_stock(rows, "accelerate-ckpt", "accelerate", OVERLAPPED_OF_STOCK),
        _of_stock(rows, "trainer-eager", "trainer", EAGER_OF_STOCK),
        _of_stock(rows, "trainer-overlapped", "trainer", OVERLAPPED_OF_STOCK),
    ]


def _not_measured(target: str) -> Verdict:
    return Verdict(target=target, measured="–", verdict="not measured", detail="")


def _blocked(label: str, row: Mapping[str, Any], field: str, limit: float) -> Verdict:
    target = f"{label} ≤ {limit} × floor"
    if "floor_s" not in row:
        return _not_measured(target)
    blocked, floor = row[field], statistics.median(row["floor_s"])
    return Verdict(
        target=target,
        measured=f"{blocked / floor:.2f} ×",
        verdict="reached" if blocked <= limit * floor else "missed",
        detail=f"{blocked * 1e3:.1f} ms; bare copy in the same process {floor * 1e3:.1f} ms",
    )


def _of_stock(
    rows: Mapping[str, Mapping[str, Any]], name: str, stock_name: str, limit: float
) -> Verdict:
    ours, stock = rows.get(name, {}), rows.get(stock_name, {})
    target = f"{name} blocked, median ≤ {limit} × {stock_name}"
    if "median_blocked_s" not in ours or "median_blocked_s" not in stock:
        return _not_measured(target)
    blocked, all_of_it = ours["median_blocked_s"], stock["median_blocked_s"]
    return Verdict(
        target=target,
        measured=f"{blocked / all_of_it:.3f} ×",
        verdict="reached" if blocked <= limit * all_of_it else "missed",
        detail=f"{blocked * 1e3:.1f} ms; stock saves for {all_of_it * 1e3:.1f} ms",
    )


def _persist(row: Mapping[str, Any]) -> Verdict:
    target = f"persist with SHA-256 ≥ {PERSIST_OF_LIMIT} × min(direct write, SHA-256 alone)"
    if not row.get("persist_s") or not row.get("direct_write_s"):
        return _not_measured(target)
    size = row["state_bytes"]
    persist, write, digest = (
        size / statistics.median(row[name]) for name in ("persist_s", "direct_write_s", "sha256_s")
    )
    ratio = persist / min(write, digest)
    return Verdict(
        target=target,
        measured=f"{ratio:.2f} ×",
        verdict="reached" if ratio >= PERSIST_OF_LIMIT else "missed",
        detail=f"{_rate(persist)}; dd of random bytes {_rate(write)}, "
        f"SHA-256 on all cores {_rate(digest)}",
    )


def _load(row: Mapping[str, Any]) -> Verdict:
    target = f"verified load ≥ {LOAD_OF_SAFETENSORS} × safetensors mmap + copy"
    if not row.get("load_s") or not row.get("safetensors_s"):
        return _not_measured(target)
    size = row["state_bytes"]
    # Hashing what was read into memory of one's own is the least that verifying can be.
    limit_field = "read_sha256_s" if row.get("read_sha256_s") else "sha256_s"
    load, plain, digest = (
        size / statistics.median(row[name]) for name in ("load_s", "safetensors_s", limit_field)
    )
    verdict = "reached" if load >= LOAD_OF_SAFETENSORS * plain else "missed"
    if verdict == "missed" and LOAD_OF_SAFETENSORS * plain > digest:
        # No verified load can reach the target here: the cores do not read and hash that fast.
        verdict = "bound" if load >= LOAD_OF_HASHING * digest else "missed"
    return Verdict(
        target=target,
        measured=f"{load / plain:.2f} ×",
        verdict=verdict,
        detail=f"{_rate(load)}; safetensors {_rate(plain)}; "
        f"{'reading and ' if limit_field != 'sha256_s' else ''}SHA-256 on all cores "
        f"{_rate(digest)}, of which the load is {load / digest:.2f} ×",
    )


def _start(row: Mapping[str, Any]) -> Verdict:
    target = f"start of the side process costs the trainer < {START_S * 1e3:.0f} ms"
    if "start_s" not in row:
        return _not_measured(target)
    longer = row["starting_step_s"] - row["step_s"]
    return Verdict(
        target=target,
        measured=f"{row['start_s'] * 1e3:.1f} ms",
        verdict="reached" if row["start_s"] < START_S else "missed",
        detail="inside Checkpointer() and prepare() of an empty state; sizing the slabs for the "
        f"real one took {row.get('prepare_s', 0.0) * 1e3:.1f} ms more, and the step beside it "
        f"{longer * 1e3:+.0f} ms more than the median (the slabs are faulted in meanwhile)",
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
