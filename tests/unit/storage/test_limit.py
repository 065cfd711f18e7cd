"""The ceiling holds over any mix of threads and sizes, and costs nothing where there is none."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from torch_ckpt.storage.limit import TokenBucket


@pytest.mark.parametrize("count", [1_000, 50_000, 700_000])
def test_many_or_few_bytes_at_a_time_are_booked_at_the_same_rate(count: int) -> None:
    bucket, began = TokenBucket(100_000), time.monotonic()
    booked = 0
    delay_s = 0.0
    while booked < 700_000:
        delay_s = bucket.delay(count)
        booked += count
    # The last byte leaves when all of them have been paid for, but for a burst of one second.
    assert delay_s == pytest.approx(booked / 100_000 - 1.0, abs=time.monotonic() - began + 0.01)


def test_threads_share_one_ceiling() -> None:
    bucket = TokenBucket(10_000_000)

    def send(count: int) -> None:
        time.sleep(bucket.delay(count))

    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, [375_000] * 40))
    assert time.monotonic() - began >= 0.45  # fifteen megabytes at ten a second, ten at once


def test_without_a_limit_nothing_waits() -> None:
    bucket = TokenBucket(None)
    assert bucket.delay(1 << 60) == bucket.delay(1 << 60) == 0.0
