"""Boxes tile a tensor when they hold each element once, and in no other case."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torch_ckpt.manifest.tiling import Box, tiles
from torch_ckpt.sharding.tiling import tiled


def at_once(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """What the ranks' check of many tensors says of this one, between two others."""
    rows = [[*o, *s] for o, s in boxes]
    table = np.array(rows, dtype=np.int64).reshape(len(boxes), 2 * len(shape))
    found = tiled(np.ones(len(boxes), dtype=np.int64), table, [shape, shape, shape])
    return found[1]


def counted(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """The same, element by element."""
    times = np.zeros(shape, dtype=int)
    for offsets, lengths in boxes:
        times[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
    return bool((times == 1).all())


@st.composite
def shape_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Boxes inside of a small shape, not many of which tile it."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    edges = [st.tuples(st.integers(0, n), st.integers(0, n)) for n in shape]
    boxes = []
    for spans in draw(st.lists(st.tuples(*edges), max_size=6)):
        ordered = [sorted(span) for span in spans]
        boxes.append(([a for a, _ in ordered], [b - a for a, b in ordered]))
    return shape, boxes


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, cut again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        offsets, lengths = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, lengths[dim]))
        low, high, start = list(lengths), list(lengths), list(offsets)
        low[dim], high[dim], start[dim] = at, lengths[dim] - at, offsets[dim] + at
        boxes += [(offsets, low), (start, high)]
    return shape, boxes


@given(shape_and_boxes())
def test_any_boxes_are_judged_as_by_counting_every_element(
    made: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, boxes = made
    assert tiles(shape, boxes) == counted(shape, boxes)
    assert at_once(shape, boxes) == counted(shape, boxes)


@given(cut_up(), st.data())
def test_a_tensor_cut_up_tiles_and_with_one_piece_elsewhere_does_not(
    made: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = made
    assert tiles(shape, boxes)
    assert at_once(shape, boxes)
    number = data.draw(st.integers(0, len(boxes) - 1))
    offsets, lengths = boxes[number]
    free = [range(whole - length + 1) for whole, length in zip(shape, lengths, strict=True)]
    elsewhere = [o for o in product(*free) if o != tuple(offsets)]
    if 0 not in lengths and elsewhere:
        boxes[number] = (data.draw(st.sampled_from(elsewhere)), lengths)
        assert not tiles(shape, boxes)
        assert not at_once(shape, boxes)


def test_a_pinwheel_that_no_straight_cut_divides_tiles() -> None:
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]
    assert not tiles((3, 3), pinwheel)
    assert tiles((3, 3), [*pinwheel, ((1, 1), (1, 1))])
    assert at_once((3, 3), [*pinwheel, ((1, 1), (1, 1))])


def test_overlaps_and_gaps_that_cancel_out_are_found_in_any_number_of_dimensions() -> None:
    for dims in (1, 2, 3, 7, 64):
        shape = (4,) + (2,) * (dims - 1)
        side = shape[1:]
        row: list[Box] = [((at, *(0,) * len(side)), (1, *side)) for at in range(4)]
        assert tiles(shape, row)
        assert at_once(shape, row)
        for wrong in ([row[0], row[0], *row[2:]], [row[1], *row[1:]], [*row[:3], row[0]]):
            assert not tiles(shape, wrong)
            assert not at_once(shape, wrong)
        # As a sum over coordinates alone, these two would be the other two.
        if dims > 1:
            corners: list[Box] = [
                ((a, b, *(0,) * (dims - 2)), (2, 1, *side[1:])) for a, b in ((0, 0), (2, 1))
            ]
            assert not tiles(shape, corners * 2)


def test_a_hundred_thousand_chunks_take_a_moment_however_they_lie() -> None:
    count = 100_000
    rows: list[Box] = [((at, 0), (1, 512)) for at in range(count)]
    grid: list[Box] = [((7 * (at % 250), 3 * (at // 250)), (7, 3)) for at in range(count)]
    for shape, boxes in (((count, 512), rows), ((1750, 1200), grid)):
        # Each of them also overlapping all others but for a row, which costs pairs their square.
        heap: list[Box] = [((at % 2, 0), (shape[0] - 1, shape[1])) for at in range(count)]
        began = time.process_time()
        assert tiles(shape, boxes)
        assert not tiles(shape, [*boxes[1:], boxes[-1]])
        assert not tiles(shape, heap)
        assert time.process_time() - began < 10
