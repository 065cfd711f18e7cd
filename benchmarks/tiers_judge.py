"""The promises about tiers, judged from one run's own numbers.

Knows the limits and the fields of the rows. Knows nothing of how they were measured or are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, Literal

from targets import Verdict
from tiers_peers import PART_BYTES, RAW

DIRECTIONS: tuple[Literal["up"], Literal["down"]] = ("up", "down")
OF_RAW = {"up": 0.8, "down": 0.7}
OF_LIMIT = 0.8
IDLE = 0.1
"""With less of the cores left idle, CPU decides how fast a transfer is."""
FLAT = 1.15
SLACK_BYTES = 2 * PART_BYTES
"""How many of the parts' buffers are in use at the peak is a matter of moments."""
LEAST_BYTES = 192 << 20
"""Of the smaller size: below it, buffers are not all in use, so memory grows with the size."""


def of_size(row: Mapping[str, Any], direction: str, size: int) -> list[dict[str, float]]:
    return row.get(direction, {}).get(str(size), [])


def judge(server: str, rows: Mapping[str, Any], size: int, hashing_s: float) -> list[Verdict]:
    """Two verdicts a direction, also where a row is missing.

    `hashing_s` is the CPU that SHA-256 alone takes over `size` bytes.
    """
    ours = rows.get("ours", {})
    verdicts = []
    for direction in DIRECTIONS:
        verdicts.append(_speed(server, rows, direction, size, hashing_s))
        verdicts.append(_memory(server, ours, direction, size))
    return verdicts


def _speed(
    server: str, rows: Mapping[str, Any], direction: str, size: int, hashing_s: float
) -> Verdict:
    how = "with hashing" if direction == "up" else "every block verified"
    target = f"{server} {direction}, {how} ≥ {OF_RAW[direction]} × raw obstore"
    ours = of_size(rows.get("ours", {}), direction, size)
    raw = {
        row["title"]: taken
        for name in RAW
        if (row := rows.get(name)) and (taken := of_size(row, direction, size))
    }
    if not ours or not raw:
        return Verdict(target=target, measured="–", verdict="not measured", detail="")
    seconds = {title: _median(taken, "seconds") for title, taken in raw.items()}
    fastest = min(seconds, key=lambda title: seconds[title])
    ratio = seconds[fastest] / _median(ours, "seconds")
    verdict = "reached" if ratio >= OF_RAW[direction] else "missed"
    limit = _limit(raw[fastest], hashing_s)
    if verdict == "missed" and limit < OF_RAW[direction] and ratio >= OF_LIMIT * limit:
        verdict = "bound"
    others = {
        row["title"]: taken
        for name, row in rows.items()
        if name != "ours" and row["title"] != fastest and (taken := of_size(row, direction, size))
    }
    shown = {"torch-ckpt": ours, fastest: raw[fastest], **others}
    told = [f"{title} {_said(taken, size)}" for title, taken in shown.items()]
    if limit < 1:
        told.append(
            f"no core is idle, and SHA-256 alone takes {hashing_s / size * 1e9:.2f} CPU s/GB, so "
            f"no verified way can have more than {limit:.2f} × of that"
        )
    return Verdict(
        target=target, measured=f"{ratio:.2f} ×", verdict=verdict, detail="; ".join(told)
    )


def _limit(raw: list[dict[str, float]], hashing_s: float) -> float:
    """What of the raw rate is left where all cores are busy and one must also hash each byte."""
    if _median(raw, "idle") > IDLE:
        return 1.0
    spent = _median(raw, "cpu_s") + _median(raw, "server_cpu_s")
    return spent / (spent + hashing_s)


def _memory(server: str, ours: Mapping[str, Any], direction: str, size: int) -> Verdict:
    target = f"{server} {direction}, peak memory flat in object size"
    half, whole = of_size(ours, direction, size // 2), of_size(ours, direction, size)
    if not half or not whole or size // 2 < LEAST_BYTES:
        return Verdict(target=target, measured="–", verdict="not measured", detail="")
    before, after = (max(one["memory_bytes"] for one in taken) for taken in (half, whole))
    flat = after <= FLAT * before + SLACK_BYTES
    return Verdict(
        target=target,
        measured=f"{after / max(before, 1):.2f} ×",
        verdict="reached" if flat else "missed",
        detail=f"{before / 1e6:.0f} MB for {size / 2e9:.2f} GB, "
        f"{after / 1e6:.0f} MB for twice as much; flat is ≤ {FLAT} × and two parts",
    )


def _said(taken: list[dict[str, float]], size: int) -> str:
    gigabytes = size / 1e9
    rate, cpu = gigabytes / _median(taken, "seconds"), _median(taken, "cpu_s") / gigabytes
    return f"{rate:.2f} GB/s at {cpu:.2f} CPU s/GB"


def _median(taken: list[dict[str, float]], field: str) -> float:
    return statistics.median(one[field] for one in taken)
