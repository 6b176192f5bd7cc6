"""Hooks of the built-in job: the accuracy curve, and slowed workers.

The worker that leads evaluates a part of the validation set now and then. What always holds: measuring takes no more than about
2 % of its time, draws no random numbers and leaves the model unchanged, so a run is the same with and without it.
"""

from __future__ import annotations

import torchquorum as tq
from torchquorum.clock import SYSTEM, Clock
from torchquorum.data.mnist import Split
from torchquorum.jobs.models import evaluate
from torchquorum.jobs.slow import Slowness

ROWS = 1000
EVERY_S = 0.5
TIMES = 50


class Measuring(tq.Hook):
    """Measures accuracy and loss on `ROWS` validation images, at most every `EVERY_S` seconds and in 2 % of the time."""

    def __init__(self, validation: Split, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        rows = min(ROWS, len(validation))
        self._split = Split(validation.images[:rows], validation.labels[:rows])
        self._next_at = 0.0
        self._warm = False

    def after_create_session(self, session: tq.hooks.HookSession) -> None:
        """Measures after the first step."""
        self._next_at = self._clock.now()

    def after_run(self, session: tq.hooks.HookSession, ran: tq.hooks.Ran) -> None:
        """Measures when it is due."""
        now = self._clock.now()
        if now >= self._next_at and session.leads:
            self._measure(session, ran.step.version)
            # The first measurement is slow, and its cost says nothing about the next.
            cost_s = self._clock.now() - now if self._warm else 0.0
            self._next_at, self._warm = now + max(EVERY_S, TIMES * cost_s), True

    def end(self, session: tq.hooks.HookSession) -> None:
        """Measures the last point of the curve."""
        if session.leads:
            self._measure(session, session.global_step)

    def _measure(self, session: tq.hooks.HookSession, version: int) -> None:
        loss, accuracy = evaluate(session.model, self._split)
        session.measure(version, **{"accuracy": accuracy, "validation/loss": loss})


class Slowed(tq.Hook):
    """Makes a slowed worker wait between a batch and its push."""

    def __init__(self, slowness: Slowness) -> None:
        self._slowness = slowness

    def before_run(self, session: tq.hooks.HookSession) -> None:
        """Waits: the gradient is computed and not yet pushed."""
        self._slowness.wait()
