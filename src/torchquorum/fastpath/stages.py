"""A step on the fast path as a sequence of stages: wherever another process may come between, it yields one.

Written by `torchquorum.fastpath.turns`, `rounds`, `participant` and `admission`. A worker runs all stages at once (`run`) and waits where
they wait; the explorer in tests/hunt runs the stages of several workers in every order, and lets workers die or freeze at each of them.
What always holds: between two stages a worker reads and writes the page as if it were alone, or holds the lock.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from torchquorum.memory.lock import Signal

_Result = TypeVar("_Result")


class Stage(Enum):
    """Where a step stands."""

    SPIN = "another worker is about to be done: looks again at once"
    LOCK = "takes the lock next"
    LOCKED = "holds the lock, in the middle of a change"
    WRITE = "writes values next"
    WRITTEN = "has written values"
    FREE = "has released the lock, and will wake others"


@dataclass(frozen=True, slots=True)
class Sleep:
    """Waits until a signal's number is not `seen` any more, or time is up."""

    signal: Signal
    seen: int
    timeout_s: float


Stages = Generator[Stage | Sleep, None, _Result]


def run(stages: Stages[_Result]) -> _Result:
    """Runs stages to their end, waiting where they wait; returns their result."""
    spin = Stage.SPIN
    try:
        while True:
            stage = next(stages)
            if stage is spin:
                os.sched_yield()
            elif isinstance(stage, Sleep):
                stage.signal.wait(stage.seen, stage.timeout_s)
    except StopIteration as end:
        return end.value
