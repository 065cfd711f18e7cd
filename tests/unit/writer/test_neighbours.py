"""A coordinator knows when a writer on its own node has ended, and never believes it of others."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_ckpt.writer.neighbours import Neighbours
from torch_ckpt.writer.orphan import listen


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[int], socket.socket]]:
    """Claims the address of a rank, as its writer does."""
    claimed: list[socket.socket] = []

    def claim(rank: int) -> socket.socket:
        listener = listen(str(tmp_path), rank)
        assert listener is not None
        claimed.append(listener)
        return listener

    yield claim
    for listener in claimed:
        listener.close()


@pytest.fixture
def neighbours(tmp_path: Path) -> Iterator[Neighbours]:
    found = Neighbours(str(tmp_path))
    yield found
    found.close()


def test_a_rank_that_was_never_here_is_never_gone(neighbours: Neighbours) -> None:
    neighbours.look([1, 2])
    assert neighbours.gone([1, 2]) == frozenset()


def test_a_writer_is_gone_when_it_ends_and_back_when_it_is_replaced(
    neighbours: Neighbours, writer: Callable[[int], socket.socket]
) -> None:
    first, other = writer(1), writer(2)
    neighbours.look([1, 2, 3])
    neighbours.look([1, 2, 3])
    assert neighbours.gone([1, 2, 3]) == frozenset()
    first.close()
    deadline = time.monotonic() + 10
    while neighbours.gone([1, 2, 3]) != {1}:
        assert time.monotonic() < deadline
    writer(1)
    assert neighbours.gone([1, 2, 3]) == frozenset()
    other.close()
    assert neighbours.gone([1]) == frozenset(), "nobody asked for rank 2"


def test_what_a_writer_says_of_itself_is_no_end(
    neighbours: Neighbours, writer: Callable[[int], socket.socket]
) -> None:
    listener = writer(1)
    neighbours.look([1])
    listener.setblocking(True)
    connection, _ = listener.accept()
    with connection:
        connection.send(b'{"trainer": 1}')
        assert neighbours.gone([1]) == frozenset()
