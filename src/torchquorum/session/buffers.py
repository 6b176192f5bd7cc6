"""Whose buffers are the run's, on a worker's side: `tq.Session(buffers=...)`.

Owned by the session. What always holds: every worker begins with the same buffers, or, where a run goes on, with those it had
then; a model without persistent buffers, or `buffers="local"`, costs nothing and sends nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from torchquorum.errors import ConfigError
from torchquorum.session.join import say
from torchquorum.transport.buffers import MODES
from torchquorum.transport.messages import Plan
from torchquorum.worker.buffer_link import BufferLink
from torchquorum.worker.buffers import LocalBuffers
from torchquorum.worker.client import Client

if TYPE_CHECKING:
    from torchquorum.session.session import Session


class RunBuffers:
    """The buffers of one session."""

    def __init__(self, session: Session, mode: str) -> None:
        if mode not in MODES:
            raise ConfigError(f"buffers={mode!r}: must be one of {', '.join(map(repr, MODES))}")
        self._session, self._mode = session, mode
        self._known: LocalBuffers | None = None
        self._initial: dict[str, torch.Tensor] | None = None

    @property
    def local(self) -> LocalBuffers | None:
        """Returns this worker's buffers, if it has any that count."""
        if self._known is None and self._mode != "local":
            self._known = LocalBuffers(self._session.model, lambda line: say(f"{self._session.task}: {line}"))
        return self._known if self._known is not None and self._known.specs else None

    def describe(self, plan: Plan) -> None:
        """Adds the buffers to the run's plan."""
        plan.buffers_mode = self._mode
        plan.buffers = self.local.specs if self.local is not None else []

    def connect(self, client: Client) -> None:
        """Gives a client the means to send buffers."""
        if self.local is None:
            return
        task = self._session.task
        ps = task.cluster.address(task.cluster.tasks("ps")[0])
        name = f"buffers/{task.index}/{secrets.token_hex(8)}".encode()
        client.buffers = BufferLink(lambda: task.connect(ps, name), task.index, client.incarnation, self.local)

    def begin(self, client: Client) -> None:
        """Takes the buffers that this worker begins, or goes on, with."""
        if self.local is not None:
            values = client.take_buffers(joining=True)
            self.local.aside = None
            self.local.load(values)

    def first_values(self) -> None:
        """Keeps the buffers that the run begins with, or goes back to them."""
        if self.local is not None and self._initial is not None:
            self.local.aside = None
            self.local.load(self._initial)
        elif self.local is not None:
            self._initial = self.local.clone()

    def take(self, ask: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Takes the run's buffers into the model; `ask` asks for them."""
        if self.local is not None and not self._has_them:
            self.local.load(ask())

    @contextmanager
    def shared(self, ask: Callable[[], Mapping[str, torch.Tensor]]) -> Iterator[None]:
        """Inside this block the model's buffers are the run's; afterwards they are this worker's again."""
        if self.local is None or self._has_them or self.local.aside is not None:
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
    def _has_them(self) -> bool:
        """Whether this worker's buffers are the run's anyway."""
        task = self._session.task
        return task.num_workers == 1 or (self._mode == "chief" and task.is_chief)
