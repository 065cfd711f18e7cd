"""Any box of a stored chunk arrives in any live box, however blocks cut the chunk."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_ckpt.manifest.entries import Chunk
from torch_ckpt.manifest.whole import StoredTensor
from torch_ckpt.sharding.reshard import deliver, deliveries, intersection, overlapping
from torch_ckpt.staging.sharded import Box


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box, torch.dtype, int, bool]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex128, torch.int8]))
    stored, held = draw(boxes_in(shape)), draw(boxes_in(shape))
    return shape, stored, held, dtype, draw(st.integers(1, 9)), draw(st.booleans())


@given(cases())
def test_the_common_part_of_two_boxes_arrives_and_nothing_else_changes(
    case: tuple[tuple[int, ...], Box, Box, torch.dtype, int, bool],
) -> None:
    shape, stored, held, dtype, step, transposed = case
    whole = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(dtype)
    chunk = part_of(whole, stored)
    raw = chunk.contiguous().reshape(-1).view(torch.uint8) if chunk.numel() else None
    live = torch.zeros(held.shape, dtype=dtype)
    if transposed and live.dim() >= 2:
        live = torch.zeros(tuple(reversed(held.shape)), dtype=dtype).permute(
            *reversed(range(live.dim()))
        )
    start = 64 * dtype.itemsize
    delivery = deliveries(
        Chunk(offsets=stored.offsets, shape=stored.shape, start=start), live, held
    )
    common = intersection(stored, held)
    assert (delivery is None) == (common is None)
    wanted = torch.zeros(held.shape, dtype=dtype)
    if delivery is not None and common is not None and raw is not None:
        block = step * dtype.itemsize
        for first in range(0, raw.numel(), block):
            piece = raw[first : first + block].clone()
            begins = start + first
            if begins < delivery.end and begins + piece.numel() > delivery.start:
                delivery.take(piece, begins)
        relative = Box(
            tuple(o - h for o, h in zip(common.offsets, held.offsets, strict=True)), common.shape
        )
        part_of(wanted, relative).copy_(part_of(whole, common))
    assert torch.equal(live, wanted)


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(box.offsets, box.shape, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def test_an_expanded_tensor_is_written_once() -> None:
    live = torch.zeros(1).expand(5)
    delivery = deliveries(Chunk(offsets=(0,), shape=(5,), start=0), live, Box((0,), (5,)))
    assert delivery is not None
    delivery.take(torch.full((5,), 3.0).view(torch.uint8), 0)
    assert live.tolist() == [3.0] * 5


def test_a_block_that_holds_neighbours_too_gives_only_what_is_needed() -> None:
    live = torch.zeros(2, 3)
    chunk = Chunk(offsets=(0, 0), shape=(2, 3), start=16)
    delivery = deliveries(chunk, live, Box((0, 0), (2, 3)))
    assert delivery is not None
    block = torch.arange(14.0).view(torch.uint8)
    delivery.take(block, 0)
    assert live.tolist() == [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_peers_block_is_let_go_of_piece_by_piece_and_arrives_whole(dim: int) -> None:
    whole = torch.arange(1536 * 1024, dtype=torch.int32).reshape(1536, 1024)
    start = 4096  # of the chunk, in a block that begins before it and ends in its last row
    block = torch.zeros(start + whole.nbytes - 100, dtype=torch.uint8)
    block[start:] = whole.view(torch.uint8).flatten()[:-100]
    live = [torch.zeros_like(part) for part in whole.chunk(2, dim)]
    found = []
    for number, one in enumerate(live):
        offsets = (number * one.shape[0], 0) if dim == 0 else (0, number * one.shape[1])
        chunk = Chunk(offsets=(0, 0), shape=(1536, 1024), start=start)
        delivery = deliveries(chunk, one, Box(offsets, tuple(one.shape)))
        assert delivery is not None
        found.append(delivery)
    let_go: list[int] = []
    deliver(found, block, 0, lambda: let_go.append(1))
    rebuilt = torch.cat(live, dim).flatten()
    assert torch.equal(rebuilt[:-25], whole.flatten()[:-25])
    assert not rebuilt[-25:].any()
    assert len(let_go) >= 5  # of a block of 6 MiB, of which no more than 1 is held


BOXES = st.lists(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(0, 3))] * 2), max_size=6)


@given(BOXES, st.tuples(*[st.tuples(st.integers(0, 4), st.integers(0, 3))] * 2))
def test_the_chunks_that_overlap_a_box_are_those_that_have_something_in_common_with_it(
    chunks: list[tuple[tuple[int, int], ...]], held: tuple[tuple[int, int], ...]
) -> None:
    def box(spans: tuple[tuple[int, int], ...]) -> Box:
        return Box(tuple(o for o, _ in spans), tuple(n for _, n in spans))

    stored = StoredTensor("t", "uint8", (7, 7))
    for number, one in enumerate(map(box, chunks)):
        stored.boxes.extend((*one.offsets, *one.shape))
        stored.parts.append(number)
        stored.starts.append(10 * number)
    expected = [
        (number, Chunk(offsets=one.offsets, shape=one.shape, start=10 * number))
        for number, one in enumerate(map(box, chunks))
        if intersection(one, box(held)) is not None
    ]
    assert list(overlapping(stored, box(held))) == expected


def test_a_scalar_overlaps_itself() -> None:
    stored = StoredTensor("t", "uint8", ())
    stored.parts.append(3)
    stored.starts.append(8)
    assert list(overlapping(stored, Box((), ()))) == [(3, Chunk(offsets=(), shape=(), start=8))]
