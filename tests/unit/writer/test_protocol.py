"""Messages arrive whole, in order, and also from a side that has died."""

from __future__ import annotations

import os

import pytest

from torch_ckpt.writer.protocol import Channel, channel_pair


@pytest.fixture
def ends() -> tuple[Channel, Channel]:
    ours, theirs = channel_pair()
    return Channel(ours), Channel(theirs)


@pytest.mark.parametrize("unread", [0, 3])
def test_what_a_dead_side_had_sent_is_still_received(
    ends: tuple[Channel, Channel], unread: int
) -> None:
    ours, theirs = ends
    for number in range(unread):
        ours.send({"beat": number})  # that it never reads: its end is then a reset
    for number in range(3):
        theirs.send({"job": number})
    theirs.close()
    assert [ours.receive() for _ in range(5)] == [{"job": 0}, {"job": 1}, {"job": 2}, None, None]
    ours.close()


def test_descriptors_travel_with_their_message(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    read, write = os.pipe()
    ours.send({"op": "slab"}, fds=(write,))
    os.close(write)
    assert theirs.receive() == {"op": "slab"}
    taken = theirs.take_fd()
    os.write(taken, b"x")
    assert os.read(read, 1) == b"x"
    os.close(taken)
    os.close(read)
    ours.close()
    theirs.close()


def test_an_offer_never_waits(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    accepted = 0
    while ours.offer({"event": "beat", "filler": "x" * 4000}):
        accepted += 1
    assert accepted
    assert theirs.receive() == {"event": "beat", "filler": "x" * 4000}
    theirs.close()
    assert not ours.offer({"event": "beat"})
    ours.close()
