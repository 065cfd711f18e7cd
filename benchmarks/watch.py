"""What the kernel counts of this very process between two moments. Knows /proc only."""

from __future__ import annotations

from pathlib import Path


class Watch:
    """What the kernel counts of this process from now on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._resident = _field("status", "VmRSS") * 1024
        self._read = _field("io", "rchar")

    def stop(self) -> tuple[int, int]:
        """Bytes read by system calls, and the peak of resident memory beyond the beginning."""
        read = _field("io", "rchar") - self._read
        return read, max(0, _field("status", "VmHWM") * 1024 - self._resident)


def _field(document: str, name: str) -> int:
    for line in Path(f"/proc/self/{document}").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise LookupError(f"/proc/self/{document} has no {name}")
