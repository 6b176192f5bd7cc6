"""Whose buffers are the run's, on a worker's side: `tq.Session(buffers=...)`.

Owned by the session's attachment. What always holds: every worker begins with the same buffers, or, where a run continues, with those
it had then; a model without persistent buffers, or `buffers="local"`, costs nothing and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from torchquorum.session.config import Setup
from torchquorum.wire.messages import Plan
from torchquorum.worker.link import Link
from torchquorum.worker.local_buffers import LocalBuffers

Ask = Callable[[], Mapping[str, torch.Tensor]]


class SessionBuffers:
    """The buffers of one session."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._mode = setup, setup.member.buffers
        self._known: LocalBuffers | None = None
        self._initial: dict[str, torch.Tensor] | None = None

    @property
    def local(self) -> LocalBuffers | None:
        """Returns this worker's buffers, if it has any that count."""
        if self._known is None and self._mode != "local":
            self._known = LocalBuffers(self._setup.model, self._setup.say)
        return self._known if self._known is not None and self._known.specs else None

    def describe(self, plan: Plan) -> None:
        """Adds the buffers to the run's plan."""
        plan.buffers_mode = self._mode
        plan.buffers = self.local.specs if self.local is not None else []

    def connect(self, link: Link) -> None:
        """Gives a link the model's buffers, if there are any that count."""
        if self.local is not None:
            link.use_buffers(self.local)

    def load_first(self, link: Link) -> None:
        """Takes the buffers that this worker begins, or continues, with."""
        if self.local is not None:
            values = link.take_buffers(joining=True)
            self.local.aside = None
            self.local.load(values)

    def reset(self) -> None:
        """Keeps the buffers that the run begins with, or returns to them."""
        if self.local is not None and self._initial is not None:
            self.local.aside = None
            self.local.load(self._initial)
        elif self.local is not None:
            self._initial = self.local.clone()

    def take(self, ask: Ask) -> None:
        """Takes the run's buffers into the model; `ask` asks for them."""
        if self.local is not None and not self._are_the_runs:
            self.local.load(ask())

    @contextmanager
    def shared(self, ask: Ask) -> Iterator[None]:
        """Inside this block the model's buffers are the run's; afterwards they are this worker's again."""
        if self.local is None or self._are_the_runs or self.local.aside is not None:
            yield
            return
        values = ask()
        own = self.local.aside = self.local.clone()
        self.local.load(values)
        try:
            yield
        finally:
            if self.local.aside is own:  # otherwise the run was restored meanwhile, and the buffers with it
                self.local.aside = None
                self.local.load(own)

    @property
    def _are_the_runs(self) -> bool:
        """Whether this worker's buffers are the run's anyway."""
        task = self._setup.task
        return task.num_workers == 1 or (self._mode == "chief" and task.is_chief)
