"""Any tensors under any sharding come back under any other one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from tests.distributed import drawn_job as job
from tests.distributed.ranks import run_ranks
from torch_ckpt import load_generation

WORLDS = (1, 2, 3, 4)
DTYPES = (
    *("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int8", "uint8", "bool", "complex64"),
)
MESHES = {
    1: [(1,), (1, 1)],
    2: [(2,), (2, 1), (1, 2)],
    3: [(3,), (1, 3), (3, 1)],
    4: [(4,), (2, 2), (1, 4), (4, 1), (2, 1, 2)],
}


@st.composite
def layouts(draw: Any, world: int, shape: tuple[int, ...]) -> job.Layout | None:
    """Any layout that a tensor of a shape can have on a number of ranks, or a plain tensor."""
    if draw(st.integers(0, 5)) == 0:
        return None
    ranks = tuple(range(world))
    # A part of the ranks, as in pipeline stages; `from_local` loses the shape of a scalar there.
    if shape and draw(st.integers(0, 3)) == 0:
        ranks = tuple(sorted(draw(st.sets(st.sampled_from(ranks), min_size=1))))
    mesh = draw(st.sampled_from(MESHES[len(ranks)]))
    if len(mesh) == 2 and shape and draw(st.integers(0, 2)) == 0:
        dim = draw(st.integers(0, len(shape) - 1))
        return job.Layout(ranks, mesh, (dim, dim), strided=True)
    choices = st.sampled_from([None, *range(len(shape))])
    return job.Layout(ranks, mesh, tuple(draw(choices) for _ in mesh))


@st.composite
def tensors(draw: Any, world: int) -> job.Drawn:
    """A tensor, how `world` ranks save it, and how any number of ranks loads it."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    if draw(st.integers(0, 9)) == 0:  # of several pieces, where ranks share the writing
        shape = (draw(st.integers(700, 900)), draw(st.integers(500, 600)))
    return job.Drawn(
        seed=draw(st.integers(0, 1 << 30)),
        shape=shape,
        dtype=draw(st.sampled_from(DTYPES)),
        saved=draw(layouts(world, shape)),
        loaded=tuple(draw(layouts(other, shape)) for other in WORLDS),
    )


def states() -> Any:
    """A state of a few tensors for every number of ranks that saves."""
    return st.tuples(*(st.lists(tensors(world), min_size=3, max_size=6) for world in WORLDS))


def drawn(count: int, seed: int) -> list[list[list[job.Drawn]]]:
    """By number of ranks that save, `count` states; processes start for all of them at once."""
    found: list[Any] = []

    @seeded(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(states())
    def collect(one: Any) -> None:
        found.append(one)

    collect()
    return [[one[index] for one in found] for index in range(len(WORLDS))]


def check(folder: Path, saved: Any) -> None:
    folder.mkdir()
    roots = [str(folder / f"by-{world}") for world in WORLDS]
    for world, root, examples in zip(WORLDS, roots, saved, strict=True):
        results = run_ranks(folder / f"save-{world}", job.save_all, world, root, examples)
        assert results == [None] * world, results
        for step, example in enumerate(examples):
            plain = load_generation(root, step)
            for number, one in enumerate(example):
                assert job.bits(plain[f"t{number}"]) == job.bits(job.whole(one)), one
    for world in WORLDS:
        results = run_ranks(folder / f"load-{world}", job.load_all, world, roots, saved)
        assert results == [[]] * world, results


@pytest.mark.slow
def test_any_tensors_come_back_under_any_other_sharding_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    check(tmp_path / "runs", drawn(4, seed=0))


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_more_tensors_come_back_too(tmp_path: Path, seed: int) -> None:
    check(tmp_path / "runs", drawn(50, seed))
