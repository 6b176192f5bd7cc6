"""Optimizers in plain arithmetic, number by number: what the variables must be, without the product and without torch.

Used by the book. What always holds: a state is never changed; an update makes another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

Values = list[float]
BETAS, EPS, MOMENTUM, DECAY = (0.9, 0.999), 1e-8, 0.5, 0.5
TOLERANCE = 1e-9


@dataclass(frozen=True)
class State:
    """What an optimizer knows at a version.

    Attributes:
        lr: The rate of the next update.
        steps: How many updates it has made.
        first, second: Momentum; for Adam the means of gradients and of their squares.
        average: The moving averages.
    """

    lr: float
    steps: int
    first: Values
    second: Values
    average: Values


def begin(values: Values) -> State:
    """Returns the state with which a run begins."""
    zeros = [0.0] * len(values)
    return State(1.0, 0, zeros, zeros, list(values))


def make(optimizer: str, parameters: Any) -> torch.optim.Optimizer:
    """Returns the optimizer that a program has."""
    match optimizer:
        case "momentum":
            return torch.optim.SGD(parameters, lr=1.0, momentum=MOMENTUM)
        case "adam":
            return torch.optim.Adam(parameters, lr=1.0, betas=BETAS, eps=EPS)
    return torch.optim.SGD(parameters, lr=1.0)


def update(optimizer: str, values: Values, mean: Values, state: State) -> tuple[Values, State]:
    """Returns the variables after an update, and the state."""
    first, second, lr = state.first, state.second, state.lr
    match optimizer:
        case "momentum":
            first = [MOMENTUM * m + g if state.steps else g for m, g in zip(first, mean, strict=True)]
            made = [v - lr * m for v, m in zip(values, first, strict=True)]
        case "adam":
            b1, b2, n = *BETAS, state.steps + 1
            first = [b1 * m + (1 - b1) * g for m, g in zip(first, mean, strict=True)]
            second = [b2 * s + (1 - b2) * g * g for s, g in zip(second, mean, strict=True)]
            rate, root = lr / (1 - b1**n), math.sqrt(1 - b2**n)
            made = [v - rate * m / (math.sqrt(s) / root + EPS) for v, m, s in zip(values, first, second, strict=True)]
        case _:
            made = [v - lr * g for v, g in zip(values, mean, strict=True)]
    return made, follow(replace(state, steps=state.steps + 1, first=first, second=second), made)


def follow(state: State, values: Values) -> State:
    """Returns the state after a version, of which the moving averages take their part."""
    return replace(state, average=[a - (1 - DECAY) * (a - v) for a, v in zip(state.average, values, strict=True)])


def same(found: Sequence[float], due: Sequence[float], *, exact: bool) -> bool:
    """Whether values are those that are due; rounded sums differ in their last digits."""
    if exact:
        return list(found) == list(due)
    return all(math.isclose(f, d, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for f, d in zip(found, due, strict=True))
