"""Trainers that end with the test that started them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.crash import programs
from tests.crash.run import Program, Trainer

Start = Callable[..., Trainer]
Resume = Callable[..., dict[str, Any]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program in a process of its own; ends it and its writers after the test."""
    started: list[Trainer] = []

    def start_one(program: Program, *args: Any) -> Trainer:
        trainer = Trainer(program, *args)
        started.append(trainer)
        return trainer

    yield start_one
    for trainer in started:
        trainer.end()


@pytest.fixture
def resume(start: Start) -> Resume:
    """Resumes in a fresh process, which closes properly; what it found."""

    def resume_one(root: object, *, size: int = programs.SMALL, **options: Any) -> dict[str, Any]:
        trainer = start(programs.resume_once, str(root), size, options)
        found = trainer.hear_dict()
        assert trainer.join() == 0
        return found

    return resume_one
