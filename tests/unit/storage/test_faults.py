"""The faulty store does what was ordered, and tells what happened."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.faults import FaultyStore
from torch_ckpt.errors import StorageError
from torch_ckpt.storage.store import open_store


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore(open_store(os.fspath(tmp_path)))


def test_the_nth_call_fails_and_the_next_works(store: FaultyStore) -> None:
    store.put("a", b"1")
    store.fail("put", nth=2)
    store.put("b", b"1")
    with pytest.raises(StorageError, match="injected"):
        store.put("c", b"1")
    store.put("c", b"1")
    assert store.calls == [("put", "a"), ("put", "b"), ("put", "c"), ("put", "c")]


def test_every_call_fails_until_released(store: FaultyStore) -> None:
    store.fail("write", nth=None, error=TimeoutError("slow"))
    for _ in range(2):
        sink = store.create("a", 1)
        with pytest.raises(TimeoutError):
            sink.write_at(0, memoryview(b"1"))
        sink.abandon()
    store.release()
    sink = store.create("a", 1)
    sink.write_at(0, memoryview(b"1"))
    sink.finish()


def test_a_blocked_call_goes_on_when_released(store: FaultyStore) -> None:
    store.block("put")
    thread = threading.Thread(target=store.put, args=("a", b"1"))
    thread.start()
    assert store.waiting.wait(10)
    assert store.entries("") == []
    store.release()
    thread.join(10)
    assert store.get("a", limit=1) == b"1"
