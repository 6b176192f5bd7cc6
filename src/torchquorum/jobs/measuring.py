"""Hooks of the built-in job: its curve of accuracy, and its slowed workers.

The chief, or its stand-in, looks at a part of the validation set now and then. What always holds: measuring takes no more
than about a fiftieth of the chief's time, draws no random numbers and leaves the model as it was, so a run is the same with
and without it.
"""

from __future__ import annotations

import time

import torchquorum as tq
from torchquorum.data.mnist import Split
from torchquorum.jobs.models import evaluate
from torchquorum.jobs.slow import Slowness

ROWS = 1000
EVERY_S = 0.5
TIMES = 50


class Measuring(tq.Hook):
    """Measures accuracy and loss on `ROWS` validation images, at most every `EVERY_S` seconds and in 2 % of the time."""

    def __init__(self, validation: Split) -> None:
        rows = min(ROWS, len(validation))
        self._split = Split(validation.images[:rows], validation.labels[:rows])
        self._next_at = 0.0
        self._warm = False

    def after_create_session(self, session: tq.Session) -> None:
        """The first look comes after the first step."""
        self._next_at = time.monotonic()

    def after_run(self, session: tq.Session, ran: tq.Ran) -> None:
        """Measures if it is time to."""
        now = time.monotonic()
        if now >= self._next_at and session.leads:
            self._measure(session, ran.step.version)
            cost_s = (
                time.monotonic() - now if self._warm else 0.0
            )  # the first look is slow and says nothing of the next
            self._next_at, self._warm = now + max(EVERY_S, TIMES * cost_s), True

    def end(self, session: tq.Session) -> None:
        """The last point of the curve."""
        if session.leads:
            self._measure(session, session.global_step)

    def _measure(self, session: tq.Session, version: int) -> None:
        loss, accuracy = evaluate(session.model, self._split)
        session.measure(version, **{"accuracy": accuracy, "validation/loss": loss})


class Slowed(tq.Hook):
    """Makes a slowed worker wait between a batch and its push."""

    def __init__(self, slowness: Slowness) -> None:
        self._slowness = slowness

    def before_run(self, session: tq.Session) -> None:
        """The gradient is computed and not yet pushed."""
        self._slowness.wait()
